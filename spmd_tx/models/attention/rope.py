"""Rotates queries and keys by their positions, in every way that a Rope declares.

Dimension key: B row, T token, N heads, E head width, R rotated pairs.
"""

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from spmd_tx.models import layers
from spmd_tx.models.declared.rope import Rope

Positions = Int[Array, "B T"] | Int[Array, "B T 3"]  # of tokens; or their time, row and column


def rotate(x_BTNE: Float[Array, "B T N E"], positions: Positions, rope: Rope) -> Float[Array, "B T N E"]:
    """Rotate the first numbers of each head, in fp32; the others stay.

    Interleaved pairs come out as two halves: first the numbers at even places, then those at odd ones.
    Scores of queries and keys that were both rotated do not depend on this order.
    """
    if rope.is_plain:
        return layers.rotate(x_BTNE, positions, rope.theta)
    width = rope.width or x_BTNE.shape[-1]
    cos, sin = angles(positions, rope, width)
    rotated, rest = x_BTNE[..., :width].astype(jnp.float32), x_BTNE[..., width:]
    if rope.is_interleaved:
        pairs = rotated.reshape(*rotated.shape[:-1], width // 2, 2)
        first, second = pairs[..., 0], pairs[..., 1]
    else:
        first, second = jnp.split(rotated, 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    parts = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*(part.astype(x_BTNE.dtype) for part in parts), rest], axis=-1)


def angles(
    positions: Positions, rope: Rope, head_width: int
) -> tuple[Float[Array, "B T R"], Float[Array, "B T R"]]:
    """Return cosines and sines, in fp32. The frequencies are computed in double precision, once.

    Where tokens have a time, a row and a column, each pair takes one of them.
    """
    frequency_R = np.array(rope.frequencies(head_width), np.float32)
    where = positions.astype(jnp.float32)
    where_BTR = where[..., None] if positions.ndim == 2 else where[..., np.array(rope.axes)]
    angle_BTR = where_BTR * frequency_R[None, None]
    return jnp.cos(angle_BTR) * rope.amplitude, jnp.sin(angle_BTR) * rope.amplitude


def grow_queries(
    q_BTNE: Float[Array, "B T N E"], positions_BT: Int[Array, "B T"], rope: Rope
) -> Float[Array, "B T N E"]:
    """Multiply queries by 1 + growth ln(1 + floor(position / span)), where the model declares a growth."""
    if not rope.query_growth:
        return q_BTNE
    spans_BT = jnp.floor(positions_BT.astype(jnp.float32) / rope.query_span)
    growth_BT = 1 + rope.query_growth * jnp.log(1 + spans_BT)
    return q_BTNE * growth_BT[:, :, None, None].astype(q_BTNE.dtype)
