"""The configuration of a model, from a Hugging Face ``config.json``. No JAX: the coordinator reads it too."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmd_tx.errors import StartError

DENSE, MIXTURE = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
ARCHITECTURES = (DENSE, MIXTURE)


@dataclass(frozen=True)
class ModelConfig:
    """Holds the sizes and constants of a decoder-only transformer."""

    architecture: str
    vocab_size: int
    d_model: int
    d_ff: int  # of one expert, if there are any
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    tied_embeddings: bool
    max_positions: int  # tokens
    n_experts: int = 0  # 0: every layer has one feed-forward block for all tokens
    experts_per_token: int = 0
    normalize_expert_weights: bool = False  # whether the chosen experts' weights sum to 1


def read_model_config(model_dir: Path) -> ModelConfig:
    """Read ``config.json``.

    Raises StartError when the file is missing or the architecture is not supported.
    """
    raw = _read_json(model_dir / "config.json")
    architecture = (raw.get("architectures") or ["(none)"])[0]
    if architecture not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise StartError(f"{model_dir} holds a {architecture}; supported architectures: {supported}")
    for key, plain in (("rope_scaling", None), ("use_sliding_window", False), ("attention_bias", False)):
        if (raw.get(key) or plain) != plain:
            raise StartError(f"{model_dir}/config.json sets {key} to {raw[key]!r}, which is not supported")
    if architecture == MIXTURE:
        _check_mixture(model_dir, raw)
    try:
        return _model_config(raw, architecture)
    except KeyError as missing:
        raise StartError(f"{model_dir}/config.json lacks the key {missing}") from None


def _model_config(raw: dict[str, Any], architecture: str) -> ModelConfig:
    n_heads = raw["num_attention_heads"]
    rope = raw.get("rope_parameters") or raw  # transformers 5 nests what earlier versions wrote flat
    if rope.get("rope_type", "default") != "default":
        raise StartError(f"rope_type {rope['rope_type']!r} is not supported")
    return ModelConfig(
        architecture=architecture,
        vocab_size=raw["vocab_size"],
        d_model=raw["hidden_size"],
        d_ff=raw["intermediate_size" if architecture == DENSE else "moe_intermediate_size"],
        n_layers=raw["num_hidden_layers"],
        n_heads=n_heads,
        n_kv_heads=raw.get("num_key_value_heads") or n_heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // n_heads,
        rope_theta=float(rope["rope_theta"]),
        rms_norm_eps=raw["rms_norm_eps"],
        tied_embeddings=raw.get("tie_word_embeddings", False),
        max_positions=raw["max_position_embeddings"],
        **(_mixture(raw) if architecture == MIXTURE else {}),
    )


def _mixture(raw: dict[str, Any]) -> dict[str, Any]:
    return {
        "n_experts": raw.get("num_local_experts") or raw["num_experts"],  # the name in transformers 5
        "experts_per_token": raw["num_experts_per_tok"],
        "normalize_expert_weights": raw.get("norm_topk_prob", False),
    }


def _check_mixture(model_dir: Path, raw: dict[str, Any]) -> None:
    """Raise StartError if some layers have experts and others have none."""
    for key, every_layer in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        if raw.get(key, every_layer) not in (every_layer, None):
            raise StartError(
                f"{model_dir}/config.json sets {key} to {raw[key]!r}, so that only some layers have experts; "
                f"supported are models in which all have ({key} {every_layer!r})"
            )
    experts = raw.get("num_local_experts") or raw.get("num_experts", 1)
    chosen = raw.get("num_experts_per_tok", 1)
    if not 1 <= chosen <= experts:
        raise StartError(
            f"{model_dir}/config.json has {experts} experts and chooses {chosen} of them for a token; "
            "num_experts_per_tok must lie between 1 and num_experts"
        )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise StartError(f"{path} does not exist; a model directory needs it") from None
    except ValueError as error:
        raise StartError(f"{path} is not valid JSON: {error}") from None
