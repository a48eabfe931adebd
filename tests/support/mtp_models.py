"""Tiny models whose own layer makes drafts (MTP), and what such drafts must be."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from spmd_tx.protocol.commands import AdapterSpec
from spmd_tx.sharding.mesh import make_mesh
from tests.golden.families import write
from tests.support.family_logits import logits

SURE = 1.5  # logits of the next token, times the root of the width
FAMILIES = "deepseek_v3", "glm4_moe", "glm4_moe_lite"
# Of a model of one layer that has experts.
ONE_LAYER = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0}


def write_with_mtp(path: Path, family: str, **keys) -> Path:
    return write(path, family, num_nextn_predict_layers=1, **keys)


def expected_logits(
    path: Path, tokens: np.ndarray, adapter: AdapterSpec = AdapterSpec(rank=1), folder: Path | None = None
) -> np.ndarray:
    """Return logits [T - 1, V] of the token after the next one, by section 2.2 of the DeepSeek-V3 report.

    Hidden states of the model follow from its logits, and the layer runs as the only one of a model whose
    embedding holds its inputs: transformers has confirmed all of these numbers.
    """
    config, tensors = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    tensors = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    at, mesh = f"model.layers.{config['num_hidden_layers']}.", make_mesh(1, 1, 1)
    head = tensors["lm_head.weight"]
    found = logits(mesh, path, tokens, adapter, folder)
    hidden = np.linalg.lstsq(head, found.T.astype(np.float64), rcond=None)[0].T

    def normed(x: np.ndarray, name: str) -> np.ndarray:
        mean = np.mean(x**2, axis=1, keepdims=True)
        return x / np.sqrt(mean + config["rms_norm_eps"]) * tensors[f"{at}{name}.weight"]

    embedded = tensors["model.embed_tokens.weight"][tokens[1:]]
    joined = np.concatenate([normed(embedded, "enorm"), normed(hidden[:-1], "hnorm")], axis=1)
    inputs = joined @ tensors[f"{at}eh_proj.weight"].T
    layer = {name.replace(at, "model.layers.0."): each for name, each in tensors.items() if at in name}
    layer |= {
        "model.norm.weight": layer.pop("model.layers.0.shared_head.norm.weight"),
        "lm_head.weight": head,
    }
    layer |= {"model.embed_tokens.weight": np.pad(inputs, ((0, len(head) - len(inputs)), (0, 0)))}
    for name in ("enorm", "hnorm", "eh_proj"):
        del layer[f"model.layers.0.{name}.weight"]
    alone = path / "alone"
    alone.mkdir(exist_ok=True)
    kinds = {"mlp_layer_types": ["sparse"]} if "mlp_layer_types" in config else {}
    (alone / "config.json").write_text(json.dumps(config | ONE_LAYER | kinds))
    save_file({name: each.astype(np.float32) for name, each in layer.items()}, alone / "model.safetensors")
    return logits(mesh, alone, np.arange(len(inputs), dtype=np.int32))


def write_that_expects(path: Path, family: str, **keys) -> Path:
    """Write a model whose next token mostly follows from the last one, and which mostly expects it."""
    write_with_mtp(path, family, **keys)
    tensors = {name: np.array(each) for name, each in load_file(path / "model.safetensors").items()}
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):  # a layer adds nothing
            tensor[:] = 0
        elif "norm" in name:
            tensor[:] = 1
        elif name.endswith("eh_proj.weight"):  # what it expects follows from the next token
            tensor[:] = np.eye(*tensor.shape)
    embed = tensors["model.embed_tokens.weight"]
    embed /= np.linalg.norm(embed, axis=1, keepdims=True)
    tensors["lm_head.weight"] = SURE * np.roll(embed, 1, axis=0)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path
