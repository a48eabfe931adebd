"""Tiny models whose checkpoints store experts in MXFP4, FP8 or INT4, with random numbers."""

import json
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from spmd_tx.models.base_weights import weights
from spmd_tx.models.checkpoint import files as checkpoint_files
from spmd_tx.models.checkpoint.tensors import parts, tensor_names
from spmd_tx.models.declared.encoding import DeclaredTensor
from spmd_tx.models.families.registry import declare
from spmd_tx.sharding.mesh import abstract_mesh
from tests.golden.families import CONFIGS

_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "symmetric": True, "group_size": 32}
MODELS: dict[str, dict[str, Any]] = {  # by encoding; their matrices have two groups or more
    "mxfp4": CONFIGS["gpt_oss"]
    | {"hidden_size": 64, "intermediate_size": 64, "quantization_config": {"quant_method": "mxfp4"}},
    "fp8": CONFIGS["deepseek_v3"]
    | {
        "moe_intermediate_size": 32,
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]},
    },
    "int4": CONFIGS["deepseek_v3"]
    | {
        "hidden_size": 64,
        "moe_intermediate_size": 64,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": _INT4}},
            "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|down)_proj.*"],
        },
    },
}


def write(directory: Path, encoding: str, **keys: Any) -> Path:
    """Write a model as Hugging Face has it; ``keys`` are of its config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    raw = MODELS[encoding] | keys
    (directory / "config.json").write_text(json.dumps(raw))
    declared = weights(declare(raw), abstract_mesh(1, 1, 1), jnp.float32)
    found: dict[str, DeclaredTensor] = {}
    for weight in jax.tree.leaves(declared):
        for name in tensor_names(weight):
            for part in parts(weight, name):
                seen = found.get(part.name, part)
                found[part.name] = DeclaredTensor(
                    part.name, tuple(map(max, seen.shape, part.shape)), part.dtype
                )
    write_tensors(directory, {name: (part.dtype or "F32", _random(part)) for name, part in found.items()})
    return directory


def write_tensors(directory: Path, tensors: dict[str, tuple[str, np.ndarray]]) -> None:
    """Write a safetensors file of arrays, each with its type's name."""
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, array) in tensors.items():
        start, end = end, end + array.nbytes
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (directory / checkpoint_files.SINGLE_FILE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in tensors.values():
            file.write(array.tobytes())


def _random(part: DeclaredTensor) -> np.ndarray:
    """Make numbers that decode to about 0.2, also where they are scales."""
    random = np.random.default_rng(zlib.crc32(part.name.encode()))
    if part.name.endswith("_scales"):
        return random.integers(122, 126, part.shape, dtype=np.uint8)
    if part.name.endswith("_scale_inv"):
        return random.uniform(0.01, 0.02, part.shape).astype(np.float32)
    if part.name.endswith("_scale"):
        return random.uniform(0.01, 0.08, part.shape).astype(ml_dtypes.bfloat16)
    if part.dtype == "I32":
        return random.integers(-(2**31), 2**31, part.shape).astype(np.int32)
    if part.dtype == "F8_E4M3":
        codes = random.integers(0, 96, part.shape, dtype=np.uint8)
        return codes | random.integers(0, 2, part.shape, dtype=np.uint8) << 7
    if part.dtype == "U8":
        return random.integers(0, 256, part.shape, dtype=np.uint8)
    values = 0.2 * random.standard_normal(part.shape)
    return (values + 1 if "norm" in part.name else values).astype(np.float32)
