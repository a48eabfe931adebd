"""The configuration of a model, from a Hugging Face ``config.json``. No JAX: the coordinator reads it too."""

import json
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from spmd_tx.errors import StartError
from spmd_tx.models.declared.channels import Glu, Mixture
from spmd_tx.models.declared.delta_rule import DeltaRule
from spmd_tx.models.declared.encoding import BASE_DTYPES
from spmd_tx.models.declared.latent import Latent
from spmd_tx.models.declared.layers import EXPERT_LORA, ExpertLora, Model
from spmd_tx.models.declared.mixers import Softmax
from spmd_tx.models.declared.plain import plain_model
from spmd_tx.models.declared.rope import Rope
from spmd_tx.models.families.keys import Refusal
from spmd_tx.models.families.registry import declare

AS_STORED = "auto"  # the base_dtype of weights that stay as a checkpoint has them
PACKED, UNPACKED = "packed", "unpacked"  # ways of keeping the weights of experts


@dataclass(frozen=True)
class ModelConfig:
    """Holds the sizes and constants of a decoder-only transformer, and its declaration."""

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
    expert_lora: ExpertLora = "shared-outer"  # the layout of adapters of experts (declared/layers.py)
    stated: Model | None = None  # None: the sizes say it all (declared/plain.py)

    @property
    def expert_rank_divisor(self) -> int:
        """By how much the rank of factors of experts is less than the adapter's."""
        return max(1, self.experts_per_token) if self.expert_lora == "per-expert" else 1

    @property
    def linear_heads(self) -> int:
        """The heads of keys of the layers with linear attention, which tp splits; 0: there are none."""
        mixer = self.declared.stateful
        return mixer.k_heads if isinstance(mixer, DeltaRule) else 0

    @property
    def window(self) -> int:
        """The tokens that a token sees in layers with a window, itself among them; 0: there are none."""
        mixer = self.declared.stateful
        return mixer.window if isinstance(mixer, Softmax) else 0

    @cached_property
    def declared(self) -> Model:
        """The declaration. Raises ValueError if one was stated that has other sizes."""
        if self.stated is None:
            return _plain(self)
        if _config(self.stated, self.expert_lora) != self:
            raise ValueError(f"the sizes of {self.architecture} are not those of its declaration")
        return self.stated


def layout_named(name: str) -> ExpertLora:
    """Return a layout of adapters of experts by its name."""
    return next(layout for layout in EXPERT_LORA if layout == name)


def read_model_config(
    model_dir: Path,
    expert_lora: str = EXPERT_LORA[0],
    expert_weights: str = UNPACKED,
    base_dtype: str = AS_STORED,
) -> ModelConfig:
    """Read ``config.json``. ``expert_lora`` names the layout of adapters of experts.

    With ``expert_weights`` "packed" devices keep experts as the checkpoint encodes them; with one of
    BASE_DTYPES they keep all adapted maps of layers in it. Raises StartError when the file is missing, or the
    model is not supported, or cannot be kept so.
    """
    raw = _read_json(model_dir / "config.json")
    try:
        model = declare(raw)
    except Refusal as problem:
        raise StartError(f"{model_dir}/config.json {problem}") from None
    if expert_weights == PACKED:
        model = _packing(model, model_dir)
    if base_dtype != AS_STORED:
        model = _in_base_dtype(model, base_dtype, model_dir)
    return configured(model, layout_named(expert_lora))


def _packing(model: Model, model_dir: Path) -> Model:
    """Return the model with packed experts. Raises StartError where it has none that can be."""
    model = replace(model, packs_experts=True)
    if not model.packed:
        raise StartError(
            f"--expert-weights is packed, but {model_dir} has no experts in MXFP4, FP8 or INT4; "
            "leave the option out"
        )
    for array in model.packed:
        if array.width_in % array.source.encoding.group:
            raise StartError(
                f"--expert-weights is packed, but {array.width_in} inputs of experts are not a multiple of "
                f"{array.source.encoding.group}, which share a scale; set it to unpacked"
            )
    return model


def _in_base_dtype(model: Model, base_dtype: str, model_dir: Path) -> Model:
    """Return the model whose adapted maps devices keep in fewer bits. Raises StartError where they cannot."""
    encoding = BASE_DTYPES[base_dtype]
    model = replace(model, base_encoding=encoding)
    for array in model.packed:
        if array.width_in % array.kept.group:
            raise StartError(
                f"--base-dtype is {base_dtype}, but the {array.width_in} inputs of {array.name} are not a "
                f"multiple of {array.kept.group}, which share a scale; set it to another one of "
                f"{', '.join(BASE_DTYPES)}, or leave it out"
            )
    return model


def configured(model: Model, expert_lora: ExpertLora = "shared-outer") -> ModelConfig:
    """Return the configuration of a declared model."""
    config = _config(model, expert_lora)
    plain = replace(config, stated=None)
    return plain if _plain(plain) == model else config


def _config(model: Model, expert_lora: ExpertLora) -> ModelConfig:
    """Return the sizes, which are those of the layers with attention and, if there are any, with experts."""
    mixers = [layer.mixer for layer in model.layers if isinstance(layer.mixer, Softmax | Latent)]
    mixtures = [layer.channel for layer in model.layers if isinstance(layer.channel, Mixture)]
    widths = [layer.channel.width for layer in model.layers if isinstance(layer.channel, Glu)]
    mixer, experts = mixers[0], mixtures[0] if mixtures else None
    return ModelConfig(
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        d_model=model.d_model,
        d_ff=experts.width if experts else max(widths),
        n_layers=model.n_layers,
        n_heads=mixer.heads,
        n_kv_heads=mixer.kv_heads,
        head_dim=mixer.width,
        rope_theta=mixer.rope.theta if mixer.rope else 0.0,
        rms_norm_eps=model.norm.eps,
        tied_embeddings=model.is_tied,
        max_positions=model.max_positions,
        n_experts=experts.experts if experts else 0,
        experts_per_token=experts.chosen if experts else 0,
        normalize_expert_weights=experts.route.normalise if experts else False,
        expert_lora=expert_lora,
        stated=model,
    )


def _plain(config: ModelConfig) -> Model:
    return plain_model(
        architecture=config.architecture,
        vocab_size=config.vocab_size,
        d_model=config.d_model,
        d_ff=config.d_ff,
        n_layers=config.n_layers,
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        rope=Rope(config.rope_theta),
        rms_norm_eps=config.rms_norm_eps,
        tied_embeddings=config.tied_embeddings,
        max_positions=config.max_positions,
        n_experts=config.n_experts,
        experts_per_token=config.experts_per_token,
        normalize_expert_weights=config.normalize_expert_weights,
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise StartError(f"{path} does not exist; a model directory needs it") from None
    except OSError as error:
        raise StartError(
            f"cannot read {path}: {error.strerror}; it must be a file that the server may read"
        ) from None
    except (ValueError, RecursionError) as error:
        raise StartError(
            f"{path} is not valid JSON: {error}; restore it from where the model came from"
        ) from None
    if not isinstance(raw, dict):
        raise StartError(f"{path} holds a {type(raw).__name__}; it must be an object with the model's keys")
    return raw
