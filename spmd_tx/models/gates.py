"""What Qwen3.5 gates with a sigmoid: the results of attention, and the expert that all tokens share.

Dimension key as in qwen3.py.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from spmd_tx.models.layers import product, rms_norm


def query_and_gate(
    y_BTH: Float[Array, "B T H"], head_dim: int
) -> tuple[Float[Array, "B T N E"], Float[Array, "B T N E"]]:
    """Split the query map's output, which has a query and then a gate for each head."""
    y_BTNE = y_BTH.reshape(*y_BTH.shape[:2], -1, 2 * head_dim)
    return y_BTNE[..., :head_dim], y_BTNE[..., head_dim:]


def gated(x: Float[Array, "..."], gate: Float[Array, "..."]) -> Float[Array, "..."]:
    """Multiply by the sigmoid of the gate, computed in fp32."""
    return x * jax.nn.sigmoid(gate.astype(jnp.float32)).astype(x.dtype)


def gated_by_token(
    x_BTD: Float[Array, "B T D"], gate_D1: Float[Array, "D 1"], h_BTD: Float[Array, "B T D"]
) -> Float[Array, "B T D"]:
    """Multiply each token's ``x`` by the sigmoid of its product with the gate's weights."""
    return gated(x_BTD, product("BTD,DO->BTO", h_BTD, gate_D1))


def zero_centred_norm(
    x: Float[Array, "... W"], weight_W: Float[Array, " W"], eps: float
) -> Float[Array, "... W"]:
    """Apply the root mean square norm with weights that are stored as their difference from 1."""
    return rms_norm(x, 1.0 + weight_W.astype(jnp.float32), eps)
