"""Sigmoid gates, as Qwen3.5 has them for attention and the shared expert, and its norms.

Dimension key as in backbone.py.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from spmd_tx.models.layers import rms_norm


def query_and_gate(
    y_BTH: Float[Array, "B T H"], head_dim: int
) -> tuple[Float[Array, "B T N E"], Float[Array, "B T N E"]]:
    """Split the query map's output, which has a query and then a gate for each head."""
    y_BTNE = y_BTH.reshape(*y_BTH.shape[:2], -1, 2 * head_dim)
    return y_BTNE[..., :head_dim], y_BTNE[..., head_dim:]


def open_by(x: Float[Array, "..."], gate: Float[Array, "..."]) -> Float[Array, "..."]:
    """Multiply by the sigmoid of the gate, computed in fp32."""
    return x * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(x.dtype)


def zero_centred_norm(
    x: Float[Array, "... W"], weight_W: Float[Array, " W"], eps: float
) -> Float[Array, "... W"]:
    """Apply the root mean square norm with weights that are stored as their difference from 1."""
    return rms_norm(x, 1.0 + weight_W.astype(jnp.float32), eps)
