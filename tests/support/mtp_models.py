"""Tiny models whose own layer makes drafts (MTP), and what such drafts must be."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from spmd_tx.demo import tiny_model
from spmd_tx.models.families.registry import declare
from spmd_tx.sharding.mesh import make_mesh
from tests.golden.families import write
from tests.support.family_logits import logits

SURE = 1.5  # logits of the next token, times the root of the width
FAMILIES = "deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen3_5", "qwen3_5_moe"
# What says in config.json that there is such a layer.
SAYS = {"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1}
# Of a model whose last layer is of its kind.
ONE_LAYER = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
BEHIND_A_LINEAR_ONE = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
LINEAR = "qwen3_5", "qwen3_5_moe"
LAST_MAPS = "out_proj.weight", "down_proj.weight", "down_proj"  # without which a layer adds nothing


def write_with_mtp(path: Path, family: str, **keys) -> Path:
    return write(path, family, **SAYS, **keys)


def expected_logits(path: Path, tokens: np.ndarray) -> np.ndarray:
    """Return logits [T - 1, V] of the token after the next one, by section 2.2 of the DeepSeek-V3 report.

    Hidden states of the model follow from its logits, and the layer runs as the last one of a model whose
    embedding holds its inputs: transformers has confirmed all of these numbers.
    """
    config, tensors = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    tensors = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    declared, mesh, head = declare(config, drafts=True).mtp, make_mesh(1, 1, 1), tensors["lm_head.weight"]
    assert declared is not None
    hidden = np.linalg.lstsq(head, logits(mesh, path, tokens).T.astype(np.float64), rcond=None)[0].T

    def normed(x: np.ndarray, name: str) -> np.ndarray:
        weight = tensors[f"{name}.weight"] + declared.norm.is_zero_centred
        return x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + config["rms_norm_eps"]) * weight

    embedded = tensors["model.embed_tokens.weight"][tokens[1:]]
    joined = np.concatenate(
        [normed(embedded, declared.of_embedding), normed(hidden[:-1], declared.of_hidden)], axis=1
    )
    inputs = joined @ tensors[f"{declared.joins}.weight"].T
    is_behind = config["model_type"].startswith(LINEAR)
    begins = f"model.layers.{int(is_behind)}."
    alone = {f"{begins}{name[len(declared.at) :]}": tensors[name] for name in tensors if declared.at in name}
    if is_behind:
        before = {name: tensors[name] for name in tensors if name.startswith("model.layers.0.")}
        alone |= {name: each * (not name.endswith(LAST_MAPS)) for name, each in before.items()}
    apart = (declared.of_embedding, declared.of_hidden, declared.joins, declared.final)
    alone = {name: each for name, each in alone.items() if not _is_of(name, declared.at, begins, apart)}
    alone |= {"model.norm.weight": tensors[f"{declared.final}.weight"], "lm_head.weight": head}
    alone |= {"model.embed_tokens.weight": np.pad(inputs, ((0, len(head) - len(inputs)), (0, 0)))}
    sparse = {"mlp_layer_types": ["sparse"]} if "mlp_layer_types" in config else {}
    says = dict.fromkeys(SAYS, 0)
    other = path / "alone"
    other.mkdir(exist_ok=True)
    changed = config | says | (BEHIND_A_LINEAR_ONE if is_behind else ONE_LAYER) | sparse
    (other / "config.json").write_text(json.dumps(changed))
    save_file({name: each.astype(np.float32) for name, each in alone.items()}, other / "model.safetensors")
    return logits(mesh, other, np.arange(len(inputs), dtype=np.int32))


def _is_of(name: str, at: str, begins: str, modules: tuple[str, ...]) -> bool:
    """Say whether a tensor is of what surrounds the layer itself."""
    return name.replace(begins, at).removesuffix(".weight") in modules


def write_that_expects(path: Path, family: str, **keys) -> Path:
    """Write a model whose next token mostly follows from the last one, and which mostly expects it."""
    tensors = _whose_token_follows(path, family, layers_add=0.0, **keys)
    for name, tensor in tensors.items():
        if "norm" in name:
            tensor[:] = 1
        elif name.endswith("eh_proj.weight"):  # what it expects follows from the next token
            tensor[:] = np.eye(*tensor.shape)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def make_drafts_right(model: Path, family: str, spec: tiny_model.Spec) -> None:
    """Write such a model over a tiny one of these sizes, whose other files stay."""
    sizes = {"vocab_size": spec.vocab_size, "max_position_embeddings": spec.max_positions}
    write_that_expects(model, family, **sizes)


def write_to_be_trained(path: Path, family: str, **keys) -> Path:
    """Write a model whose tokens depend on the last one, and somewhat on all before; it expects anything."""
    tensors = _whose_token_follows(path, family, layers_add=0.05, **keys)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _whose_token_follows(path: Path, family: str, layers_add: float, **keys) -> dict[str, np.ndarray]:
    """Return the tensors of a model whose head has the embedding of the token before."""
    write_with_mtp(path, family, **keys)
    tensors = {name: np.array(each) for name, each in load_file(path / "model.safetensors").items()}
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= layers_add
    embed = tensors["model.embed_tokens.weight"]
    embed /= np.linalg.norm(embed, axis=1, keepdims=True)
    tensors["lm_head.weight"] = SURE * np.roll(embed, 1, axis=0)
    return tensors
