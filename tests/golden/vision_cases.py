"""Tiny models that see, with random weights that are made again from their names, and images for them.

transformers_vision.npz holds for each model ``<name>/tokens/<rows>x<columns>`` float32 [P, n, D], the tokens
TOKENS of an image, for the embedding and then those of deep mergers; ``<name>/logits`` float32 [n, V], what
transformers answers at ROWS of the prompt; and of that ``<name>/places`` int32 [T, 3]. ``<name>/greedy``
int32 [n] is how it goes on, and ``<name>/greedy_logprobs`` float32 [n]. ``<name>/slope/<map>`` float32
[L, in, KEPT] are the first columns of the gradients of some maps: of the negated sum of the log-probabilities
of the prompt's text behind ``FROM``.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from spmd_tx.demo.tiny_families import stored_shapes
from spmd_tx.models.declared.model import Adapted, Model
from spmd_tx.models.families.registry import declare

NUMBERS = Path(__file__).parent / "transformers_vision.npz"
GRIDS = ((16, 16), (22, 30), (28, 10), (4, 66), (66, 4), (2, 128))  # rows and columns of patches
TOKENS = (0, 1, 9, 17, 40, -1)  # of an image
VOCABULARY, D_MODEL = 96, 32
STD = 0.06  # larger weights amplify the rounding of fp32
IMAGE_ID = 90

Piece = int | tuple[int, int]  # text tokens, or the grid of an image
PROMPT: tuple[Piece, ...] = (5, (22, 30), 7, (28, 10), 9)
GREEDY = 32  # tokens
KEPT, FROM = 8, 170  # columns; behind the first image
ROWS = (0, 4, 5, 6, 100, 169, 170, 176, 177, 246, 247, 255)

_TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 144,
    "out_hidden_size": D_MODEL,
    "hidden_act": "gelu_pytorch_tanh",
    "in_channels": 3,
}
_DEEP = {"deepstack_visual_indexes": [0, 2]}
_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": D_MODEL,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_FULL = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    }
}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def _config(
    architecture: str, model_type: str, text: dict[str, Any], vision: dict[str, Any]
) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "tie_word_embeddings": False,
        "text_config": text | {"model_type": f"{model_type}_text"},
        "vision_config": vision | {"model_type": model_type},
        "image_token_id": IMAGE_ID,
        "video_token_id": IMAGE_ID + 1,
        "vision_start_token_id": IMAGE_ID + 2,
        "vision_end_token_id": IMAGE_ID + 3,
    }


CONFIGS = {
    "qwen3_5": _config("Qwen3_5ForConditionalGeneration", "qwen3_5", _TEXT | _LINEAR, _TOWER),
    "qwen3_5_moe": _config(
        "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_moe",
        _TEXT | _LINEAR | _EXPERTS | {"shared_expert_intermediate_size": 24},
        _TOWER,
    ),
    "qwen3_vl": _config("Qwen3VLForConditionalGeneration", "qwen3_vl", _TEXT | _FULL, _TOWER | _DEEP),
    "qwen3_vl_moe": _config(
        "Qwen3VLMoeForConditionalGeneration",
        "qwen3_vl_moe",
        _TEXT | _FULL | _EXPERTS | {"norm_topk_prob": True},
        _TOWER | _DEEP,
    ),
}


def patches(grid: tuple[int, int]) -> np.ndarray:
    """Return a random image, uint8 [N, 768]: of each patch a mean and noise around it."""
    generator = np.random.default_rng([2, *grid])
    count = grid[0] * grid[1]
    means = generator.integers(30, 226, (count, 3, 1))
    return (
        np.clip(means + 30 * generator.standard_normal((count, 3, 256)), 0, 255)
        .astype(np.uint8)
        .reshape(count, -1)
    )


def count(piece: Piece) -> int:
    """Return the tokens of a piece."""
    return piece if isinstance(piece, int) else piece[0] * piece[1] // 4


def is_image() -> np.ndarray:
    """Return which tokens of the prompt are of images."""
    return np.concatenate([np.full(count(piece), not isinstance(piece, int)) for piece in PROMPT])


def sloped(model: Model) -> dict[str, Adapted]:
    """Return the maps whose gradients are kept: of keys and of feed-forward blocks."""
    kept = {name: each for name, each in model.adapted.items() if each.map.name in ("k", "down")}
    are_fused = {name for name, each in kept.items() if each.map.experts or each.map.source.rows is not None}
    return {name: each for name, each in kept.items() if name not in are_fused}


def text() -> np.ndarray:
    """Return the prompt's ids, which mean nothing where there are images."""
    return np.random.default_rng(3).integers(1, IMAGE_ID, len(is_image()), dtype=np.int32)


def write(directory: Path, name: str) -> Path:
    """Write a model as Hugging Face has it, in fp32."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIGS[name]))
    shapes = stored_shapes(declare(CONFIGS[name]))
    weights = {tensor: _random(tensor, shape) for tensor, shape in shapes.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _random(name: str, shape: tuple[int, ...]) -> np.ndarray:
    values = STD * np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    return (values + 1 if "norm" in name and name.endswith("weight") else values).astype(np.float32)
