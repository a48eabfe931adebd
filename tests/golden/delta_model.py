"""A tiny random checkpoint of Qwen3.5 and an adapter, made from a seed; its logits are in NUMBERS.

For each sequence ``logits/<number>`` is float32 [n, V]: what transformers answers at the positions ROWS.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.golden.delta_cases import random

LENGTHS = (30, 90)
ROWS = (0, 1, 7, 28, 29)  # besides the last ones
VOCABULARY, D_MODEL, D_FF = 96, 32, 48
SEED, RANK, SCALE = 100, 3, 0.5

TEXT: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "vocab_size": VOCABULARY,
    "hidden_size": D_MODEL,
    "intermediate_size": D_FF,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}
CONFIG = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "tie_word_embeddings": False,
    "text_config": TEXT,
}
PREFIX = "model.language_model."


def shapes() -> dict[str, tuple[int, ...]]:
    """Return the shapes of all tensors by their names."""
    found: dict[str, tuple[int, ...]] = {
        f"{PREFIX}embed_tokens.weight": (VOCABULARY, D_MODEL),
        f"{PREFIX}norm.weight": (D_MODEL,),
        "lm_head.weight": (VOCABULARY, D_MODEL),
    }
    for number, kind in enumerate(TEXT["layer_types"]):
        at = f"{PREFIX}layers.{number}."
        mixer = "linear_attn." if kind == "linear_attention" else "self_attn."
        found |= {f"{at}{mixer}{name}": shape for name, shape in MIXERS[kind].items()}
        found |= {
            f"{at}input_layernorm.weight": (D_MODEL,),
            f"{at}post_attention_layernorm.weight": (D_MODEL,),
            f"{at}mlp.gate_proj.weight": (D_FF, D_MODEL),
            f"{at}mlp.up_proj.weight": (D_FF, D_MODEL),
            f"{at}mlp.down_proj.weight": (D_MODEL, D_FF),
        }
    return found


MIXERS: dict[str, dict[str, tuple[int, ...]]] = {
    "linear_attention": {
        "in_proj_qkv.weight": (64, D_MODEL),
        "in_proj_z.weight": (32, D_MODEL),
        "in_proj_a.weight": (4, D_MODEL),
        "in_proj_b.weight": (4, D_MODEL),
        "conv1d.weight": (64, 1, 4),
        "A_log": (4,),
        "dt_bias": (4,),
        "norm.weight": (8,),
        "out_proj.weight": (D_MODEL, 32),
    },
    "full_attention": {
        "q_proj.weight": (128, D_MODEL),
        "k_proj.weight": (32, D_MODEL),
        "v_proj.weight": (32, D_MODEL),
        "o_proj.weight": (D_MODEL, 64),
        "q_norm.weight": (16,),
        "k_norm.weight": (16,),
    },
}


def tensors() -> dict[str, np.ndarray]:
    """Return all tensors of the text model by their names."""
    arrays = {}
    for seed, (name, shape) in enumerate(shapes().items(), start=SEED):
        arrays[name] = random(seed, *shape, std=0.5 if "conv1d" in name else 0.2)
        if name.endswith("linear_attn.norm.weight"):
            arrays[name] += 1
    return arrays


def write(directory: Path) -> Path:
    """Write the checkpoint, with tensors that are not of the text model among the others."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    others = {"mtp.fc.weight": np.zeros(3, np.float32), "model.visual.x": np.zeros(3, np.float32)}
    save_file(tensors() | others, directory / "model.safetensors")
    return directory


def sequences() -> list[np.ndarray]:
    return [
        np.random.default_rng(SEED + length).integers(0, VOCABULARY, length, np.int32) for length in LENGTHS
    ]


def rows_of(length: int) -> list[int]:
    return sorted({row for row in ROWS if row < length} | {length - 2, length - 1})


def factors(name: str, layers: int, width_in: int, width_out: int) -> tuple[np.ndarray, np.ndarray]:
    """Return A [layers, R, I] and B [layers, R, O] of an adapted map, by its name in the model."""
    seed = SEED + 1000 + sum(name.encode())
    return random(seed, layers, RANK, width_in, std=0.2), random(seed + 500, layers, RANK, width_out, std=0.2)
