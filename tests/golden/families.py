"""Tiny models of families, with random weights that are made again from their names.

transformers_families.npz holds ``<name>/logits`` float32 [n, V]: what transformers answers at ROWS of
``tokens(name)``.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from spmd_tx.demo.tiny_families import stored_shapes
from spmd_tx.models.families.registry import declare

LOGITS = Path(__file__).parent / "transformers_families.npz"
LENGTH, ROWS = 40, (0, 1, 7, 8, 22, 39)
VOCABULARY = 96
STD = 0.2

_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 32}
_COMMON = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
_DENSE = _COMMON | _ATTENTION | {"num_hidden_layers": 2, "intermediate_size": 48}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
}
_LATENT = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "rope_interleave": True,
    "first_k_dense_replace": 1,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "hidden_act": "silu",
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _DENSE
    | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "mistral": _DENSE
    | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}
    | {"rope_theta": 10000.0},
    "ministral3": _DENSE
    | {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3", "sliding_window": None}
    | {
        "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
    },
    "qwen2": _DENSE
    | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "use_sliding_window": False}
    | {"rope_theta": 1e6},
    "phi3": _DENSE
    | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "sliding_window": None}
    | {"rope_theta": 10000.0, "partial_rotary_factor": 0.75, "pad_token_id": 0},
    "phi3_longrope": _DENSE
    | {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "sliding_window": None}
    | {"rope_theta": 10000.0, "partial_rotary_factor": 0.75, "pad_token_id": 0}
    | {"hidden_size": 64, "original_max_position_embeddings": 64, "tie_word_embeddings": True}
    | {
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 4.0],
            "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0],
        }
    },
    "smollm3": _DENSE
    | {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "num_hidden_layers": 4}
    | {"no_rope_layers": [1, 0, 1, 0], "rope_theta": 10000.0, "pad_token_id": 0},
    "qwen3_yarn": _DENSE
    | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_scaling": _YARN}
    | {"rope_theta": 10000.0, "max_position_embeddings": 64},
    "qwen3_moe": _COMMON
    | _ATTENTION
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 2,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_theta": 10000.0,
    },
    "glm4_moe": _COMMON
    | _ATTENTION
    | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "use_qk_norm": True,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
    },
    "deepseek_v3": _COMMON
    | _LATENT
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "q_lora_rank": 24,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "glm4_moe_lite": _COMMON
    | _LATENT
    | {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "q_lora_rank": 16,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "gpt_oss": _COMMON
    | _ATTENTION
    | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 9,
        "intermediate_size": 24,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 8,
        },
    },
    "qwen3_5": _DENSE
    | _LINEAR
    | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "num_hidden_layers": 4},
    "qwen3_5_moe": _COMMON
    | _ATTENTION
    | _LINEAR
    | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 4,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    },
}


def tokens(name: str) -> np.ndarray:
    return np.random.default_rng(zlib.crc32(name.encode())).integers(0, VOCABULARY, LENGTH, dtype=np.int32)


def write(directory: Path, name: str, **keys: Any) -> Path:
    """Write a model as Hugging Face has it, in fp32; ``keys`` are of its config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    raw = CONFIGS[name] | keys
    (directory / "config.json").write_text(json.dumps(raw))
    shapes = stored_shapes(declare(raw, drafts=True))
    weights = {tensor: _random(tensor, shape) for tensor, shape in shapes.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def _random(name: str, shape: tuple[int, ...]) -> np.ndarray:
    values = STD * np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    return (values + 1 if "norm" in name else values).astype(np.float32)
