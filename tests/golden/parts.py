"""What transformers_parts.npz is of: parts of families, with inputs and weights made again from their seeds.

Configurations are as in a config.json. The file's arrays are described at each group of cases.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

PARTS = Path(__file__).parent / "transformers_parts.npz"


def random(seed: int, *shape: int, scale: float = 1.0) -> np.ndarray:
    return (scale * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


# Rotary embeddings: "rope/<name>" float32 [2, positions, R], cosines and sines.
POSITIONS = np.array([0, 1, 5, 33, 100], np.int32)
SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 32}
LATENT_SIZES = SIZES | {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "v_head_dim": 6,
    "qk_nope_head_dim": 8,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@dataclass(frozen=True)
class RopeCase:
    """A model type of transformers, its config.json, and the width that it rotates among."""

    model_type: str
    config: dict[str, Any]
    head_width: int


def _llama(**keys: Any) -> dict[str, Any]:
    return SIZES | {"head_dim": 16, "max_position_embeddings": 256} | keys


ROPES = {
    "plain": RopeCase("llama", _llama(rope_theta=5e5), 16),
    "linear": RopeCase("llama", _llama(rope_theta=1e4, rope_scaling={"type": "linear", "factor": 3.0}), 16),
    "llama3": RopeCase(
        "llama",
        _llama(
            rope_theta=5e5,
            rope_scaling={
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
        16,
    ),
    "yarn": RopeCase("qwen3", _llama(rope_theta=1e6, rope_scaling=YARN), 16),
    "yarn_nested": RopeCase("qwen3", _llama(rope_parameters=YARN | {"rope_theta": 1e4}), 16),
    "yarn_given": RopeCase(
        "qwen3", _llama(rope_theta=1e6, rope_scaling=YARN | {"attention_factor": 0.9, "beta_fast": 16.0}), 16
    ),
    "gpt_oss": RopeCase(
        "gpt_oss",
        SIZES
        | {"head_dim": 16, "max_position_embeddings": 2048, "num_local_experts": 4, "rope_theta": 150000.0}
        | {"rope_scaling": YARN | {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}},
        16,
    ),
    "deepseek": RopeCase(
        "deepseek_v3",
        LATENT_SIZES
        | {"qk_rope_head_dim": 8, "max_position_embeddings": 2560, "rope_theta": 10000}
        | {
            "rope_scaling": {
                "type": "yarn",
                "factor": 40,
                "original_max_position_embeddings": 64,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
            }
        },
        8,
    ),
    "glm": RopeCase(
        "glm4_moe",
        SIZES
        | {"head_dim": 16, "max_position_embeddings": 256, "partial_rotary_factor": 0.5, "rope_theta": 1e6},
        16,
    ),
    "ministral": RopeCase(
        "ministral3",
        _llama(
            rope_parameters=YARN
            | {"rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16}
            | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
        ),
        16,
    ),
}

# Growth of queries, of the ropes that declare it: "growth/<name>" float32 [positions].
GROWING = ("ministral",)

# Routers: "route/<name>/choices" int32 [T, C], sorted, and "route/<name>/gates" float32 [T, X].
ROUTED_TOKENS, ROUTED_WIDTH, ROUTED_EXPERTS = 24, 16, 16


@dataclass(frozen=True)
class RouteCase:
    """A module of transformers, its config.json, and what is random in it."""

    module: str  # and class, within transformers.models
    config: dict[str, Any]
    seed: int
    has_bias: bool = False
    has_correction: bool = False

    @property
    def inputs(self) -> np.ndarray:
        return random(self.seed, ROUTED_TOKENS, ROUTED_WIDTH)

    @property
    def weights(self) -> dict[str, np.ndarray]:
        found = {"weight": random(self.seed + 1, ROUTED_EXPERTS, ROUTED_WIDTH, scale=0.3)}
        if self.has_bias:
            found["bias"] = random(self.seed + 2, ROUTED_EXPERTS)
        if self.has_correction:
            found["e_score_correction_bias"] = random(self.seed + 3, ROUTED_EXPERTS, scale=0.2)
        return found


def _routed(**keys: Any) -> dict[str, Any]:
    return {"hidden_size": ROUTED_WIDTH, "n_routed_experts": ROUTED_EXPERTS, "norm_topk_prob": True} | keys


DEEPSEEK_ROUTER = "deepseek_v3.modeling_deepseek_v3:DeepseekV3TopkRouter"
ROUTES = {
    "groups": RouteCase(
        DEEPSEEK_ROUTER,
        _routed(n_group=4, topk_group=2, num_experts_per_tok=4, routed_scaling_factor=2.5),
        seed=10,
        has_correction=True,
    ),
    "not_normalised": RouteCase(
        DEEPSEEK_ROUTER,
        _routed(n_group=8, topk_group=3, num_experts_per_tok=3, routed_scaling_factor=1.5)
        | {"norm_topk_prob": False},
        seed=20,
        has_correction=True,
    ),
    "one_group": RouteCase(
        "glm4_moe.modeling_glm4_moe:Glm4MoeTopkRouter",
        _routed(n_group=1, topk_group=1, num_experts_per_tok=4, routed_scaling_factor=1.8),
        seed=30,
        has_correction=True,
    ),
    "gpt_oss": RouteCase(
        "gpt_oss.modeling_gpt_oss:GptOssTopKRouter",
        {"hidden_size": ROUTED_WIDTH, "num_local_experts": ROUTED_EXPERTS, "num_experts_per_tok": 4},
        seed=40,
        has_bias=True,
    ),
}

# Attention: "attention/<name>" float32 [T, D], after the output projection.
TOKENS = 14


@dataclass(frozen=True)
class AttentionCase:
    """A module of transformers, its config.json and the shapes of its weights."""

    module: str  # and class, within transformers.models
    model_type: str
    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    seed: int
    layer: int = 0
    window: int = 0
    positions: np.ndarray = field(default_factory=lambda: np.arange(TOKENS, dtype=np.int32))

    @property
    def inputs(self) -> np.ndarray:
        return random(self.seed, TOKENS, self.config["hidden_size"])

    @property
    def weights(self) -> dict[str, np.ndarray]:
        """Matrices [out, in] whose outputs have about the size of their inputs; norms around 1."""
        found = {}
        for number, (name, shape) in enumerate(self.shapes.items()):
            scale = 2 * shape[-1] ** -0.5 if len(shape) == 2 else 0.3
            found[name] = random(self.seed + 1 + number, *shape, scale=scale)
            if "layernorm" in name:
                found[name] += 1
        return found


def _latent(q_rank: int | None = 24, **keys: Any) -> dict[str, Any]:
    rope = {"qk_rope_head_dim": 8, "max_position_embeddings": 2560, "q_lora_rank": q_rank}
    return LATENT_SIZES | rope | {"rope_theta": 10000} | keys


def _latent_shapes(q_rank: int | None = 24) -> dict[str, tuple[int, ...]]:
    queries = 4 * (8 + 8)
    first: dict[str, tuple[int, ...]] = {"q_proj.weight": (queries, 64)}
    if q_rank:
        first = {
            "q_a_proj.weight": (q_rank, 64),
            "q_a_layernorm.weight": (q_rank,),
            "q_b_proj.weight": (queries, q_rank),
        }
    return first | {
        "kv_a_proj_with_mqa.weight": (16 + 8, 64),
        "kv_a_layernorm.weight": (16,),
        "kv_b_proj.weight": (4 * (8 + 6), 16),
        "o_proj.weight": (64, 4 * 6),
    }


DEEPSEEK_ATTENTION = "deepseek_v3.modeling_deepseek_v3:DeepseekV3Attention"
LATENT = {
    "deepseek": AttentionCase(
        DEEPSEEK_ATTENTION,
        "deepseek_v3",
        _latent(rope_scaling=ROPES["deepseek"].config["rope_scaling"]),
        _latent_shapes(),
        seed=100,
    ),
    "no_q_rank": AttentionCase(
        DEEPSEEK_ATTENTION, "deepseek_v3", _latent(q_rank=None), _latent_shapes(None), seed=120
    ),
    "glm_lite": AttentionCase(
        "glm4_moe_lite.modeling_glm4_moe_lite:Glm4MoeLiteAttention",
        "glm4_moe_lite",
        _latent(rope_theta=1000000),
        _latent_shapes(),
        seed=140,
    ),
    "mistral4": AttentionCase(
        "mistral4.modeling_mistral4:Mistral4Attention",
        "mistral4",
        _latent(
            max_position_embeddings=512,
            rope_parameters=YARN
            | {"factor": 128.0, "original_max_position_embeddings": 4, "rope_theta": 10000.0}
            | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        ),
        _latent_shapes(),
        seed=160,
    ),
}

_HEADS = {"num_key_value_heads": 2, "head_dim": 16}
_GPT_OSS = {"q": (64, 64), "k": (32, 64), "v": (32, 64), "o": (64, 64)}
_GPT_OSS_SHAPES: dict[str, tuple[int, ...]] = {
    **{f"{name}_proj.weight": shape for name, shape in _GPT_OSS.items()},
    **{f"{name}_proj.bias": shape[:1] for name, shape in _GPT_OSS.items()},
    "sinks": (4,),
}
SINKS = {
    name: AttentionCase(
        "gpt_oss.modeling_gpt_oss:GptOssAttention",
        "gpt_oss",
        ROPES["gpt_oss"].config | _HEADS | {"num_hidden_layers": 2, "sliding_window": 5},
        _GPT_OSS_SHAPES,
        seed=200 + 20 * layer,
        layer=layer,
        window=window,
    )
    for name, layer, window in (("sliding", 0, 5), ("full", 1, 0))
}

# Activations: "activation/<name>" float32 [6, F]. For the clamped one, gate and up alternate.
GATED = random(300, 6, 16, scale=6.0)

# "mxfp4" float32 [X, I, O]: the matrices of experts whose parts these are.
MXFP4_BLOCKS = np.random.default_rng(310).integers(0, 256, (2, 6, 3, 16), dtype=np.uint8)
MXFP4_SCALES = np.random.default_rng(311).integers(110, 135, (2, 6, 3), dtype=np.uint8)

# "fp8" float32 [O, I]: a matrix of whole blocks.
FP8_BLOCK = 4
FP8_CODES = np.random.default_rng(320).integers(0, 127, (8, 12), dtype=np.uint8)
FP8_SCALES = np.abs(random(321, 2, 3)) + 0.1
