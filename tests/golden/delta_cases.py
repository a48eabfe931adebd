"""What transformers_delta_rule.npz has the results of. All inputs and weights are made again from seeds."""

from pathlib import Path

import numpy as np

from spmd_tx.models.declared.delta_rule import DeltaRule

NUMBERS = Path(__file__).parent / "transformers_delta_rule.npz"

EPS, THETA = 1e-6, 1e4
SIZES = DeltaRule(k_heads=2, v_heads=6, k_width=8, v_width=10, taps=4, eps=EPS)
LENGTH = 150  # tokens: two chunks and a part of one
D_MODEL = 24
HEADS, KV_HEADS, HEAD_DIM, ROTATED = 4, 2, 16, 4


def random(seed: int, *shape: int, std: float = 1.0) -> np.ndarray:
    return (std * np.random.default_rng(seed).normal(size=shape)).astype(np.float32)


def rule_inputs() -> dict[str, np.ndarray]:
    """Return the rule's inputs [T, heads, width] and [T, heads]; neighbouring keys are alike."""
    keys = random(2, LENGTH, SIZES.k_heads, SIZES.k_width) + 2 * random(3, 1, SIZES.k_heads, SIZES.k_width)
    return {
        "q": random(1, LENGTH, SIZES.k_heads, SIZES.k_width),
        "k": keys,
        "v": random(4, LENGTH, SIZES.v_heads, SIZES.v_width),
        "decay": -np.abs(random(5, LENGTH, SIZES.v_heads, std=0.1)),
        "strength": 1 / (1 + np.exp(-random(6, LENGTH, SIZES.v_heads) - 1)),
    }


def rule_slope() -> np.ndarray:
    """Return the gradient of a loss by the rule's results."""
    return random(7, LENGTH, SIZES.v_heads, SIZES.v_width)


def layer_weights() -> dict[str, np.ndarray]:
    """Return a layer's weights by the names of their declaration, [in, out]."""
    return {
        "q": random(21, D_MODEL, SIZES.keys, std=0.3),
        "k": random(22, D_MODEL, SIZES.keys, std=0.3),
        "v": random(23, D_MODEL, SIZES.values, std=0.3),
        "z": random(24, D_MODEL, SIZES.values, std=0.3),
        "a": random(25, D_MODEL, SIZES.v_heads, std=0.3),
        "b": random(26, D_MODEL, SIZES.v_heads, std=0.3),
        "out": random(27, SIZES.values, D_MODEL, std=0.3),
        "taps": random(20, SIZES.channels, 1, SIZES.taps, std=0.5),
        "a_log": random(28, SIZES.v_heads, std=0.5) - 2,
        "dt_bias": random(29, SIZES.v_heads),
        "norm": 1 + random(30, SIZES.v_width, std=0.2),
    }


def layer_input() -> np.ndarray:
    return random(31, LENGTH, D_MODEL)


def layer_slope() -> np.ndarray:
    return random(32, LENGTH, D_MODEL)


def attention_weights() -> dict[str, np.ndarray]:
    """Return the weights of gated attention, [in, out]; the norms' as their difference from 1."""
    return {
        "q": random(40, D_MODEL, 2 * HEADS * HEAD_DIM, std=0.3),
        "k": random(41, D_MODEL, KV_HEADS * HEAD_DIM, std=0.3),
        "v": random(42, D_MODEL, KV_HEADS * HEAD_DIM, std=0.3),
        "o": random(43, HEADS * HEAD_DIM, D_MODEL, std=0.3),
        "q_norm": random(44, HEAD_DIM, std=0.2),
        "k_norm": random(45, HEAD_DIM, std=0.2),
    }
