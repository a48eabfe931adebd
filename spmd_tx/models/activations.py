"""The functions between the two halves of a feed-forward block: of the gate, and of gate and up together."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

from spmd_tx.models.layers import silu

CLAMP_ALPHA, CLAMP_LIMIT = 1.702, 7.0  # of gpt-oss


def gated(activation: str, gate: Array, up: Array) -> Array:
    """Return what the down projection takes, by a name of ACTIVATIONS."""
    return ACTIVATIONS[activation](gate, up)


def clamped_swiglu(
    gate: Array, up: Array, *, alpha: float = CLAMP_ALPHA, limit: float = CLAMP_LIMIT
) -> Array:
    """Return (up + 1) gate sigmoid(alpha gate) within limits, as in gpt-oss (OpenAI 2025), in fp32."""
    gate32 = jnp.minimum(gate.astype(jnp.float32), limit)
    up32 = jnp.clip(up.astype(jnp.float32), -limit, limit)
    return ((up32 + 1) * gate32 * jax.nn.sigmoid(alpha * gate32)).astype(gate.dtype)


def _gelu_tanh(x: Array) -> Array:
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


ACTIVATIONS: dict[str, Callable[[Array, Array], Array]] = {
    "silu": lambda gate, up: silu(gate) * up,
    "gelu_tanh": lambda gate, up: _gelu_tanh(gate) * up,
    "clamped_swiglu": clamped_swiglu,
}
