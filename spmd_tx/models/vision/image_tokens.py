"""Looks up the tokens of images in the pool that extends the vocabulary.

The rows of the pool are split over tp, as those of the vocabulary are.
Dimension key: B row, T token, P plane, S row of the pool (this device's part), D model width.
"""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from spmd_tx.sharding.mesh import TP


def image_tokens(
    images_PSD: Float[Array, "P S D"], rows_BT: Int[Array, "B T"], plane: Array | int
) -> Float[Array, "B T D"]:
    """Return what the pool has at these rows, and zeros elsewhere: to be summed over tp.

    Rows outside the pool belong to text; those of other devices are theirs.
    """
    local_BT = rows_BT - lax.axis_index(TP) * images_PSD.shape[1]
    is_here_BT = (local_BT >= 0) & (local_BT < images_PSD.shape[1])
    x_BTD = images_PSD[plane, jnp.where(is_here_BT, local_BT, 0)]
    return jnp.where(is_here_BT[..., None], x_BTD, jnp.zeros((), x_BTD.dtype))
