"""Where the patches of an image are, and the learned positions there.

Patches come in blocks of 2 x 2: block row, block column, row, column. Dimension key as in tower.py.
"""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from spmd_tx.models.declared.tower import MERGE, MERGED

Grid = Int[Array, "2"]  # rows and columns of patches, which are multiples of MERGE
Places = tuple[Int[Array, " N"], Int[Array, " N"]]  # the row and the column of each patch


def patch_places(grid: Grid, count: int) -> Places:
    """Return where each of so many patches is; behind the image's end the rows go on."""
    index_N = jnp.arange(count)
    block_N, within_N = index_N // MERGED, index_N % MERGED
    blocks = jnp.maximum(grid[1], MERGE) // MERGE  # of a row; an image without patches is one column wide
    row_N = block_N // blocks * MERGE + within_N // MERGE
    return row_N, block_N % blocks * MERGE + within_N % MERGE


def resampled(table_SD: Float[Array, "S D"], side: int, grid: Grid, places: Places) -> Float[Array, "N D"]:
    """Return the positions that a square table has learned, stretched bilinearly from corner to corner.

    Whole numbers up to the division give the exact neighbours. The sum is in fp32.
    """
    (i_N, u_N), (j_N, v_N) = (
        _neighbour(place_N, count, side) for place_N, count in zip(places, grid, strict=True)
    )
    below_N, right_N = jnp.minimum(i_N + 1, side - 1), jnp.minimum(j_N + 1, side - 1)
    corners = (
        (i_N, j_N, (1 - u_N) * (1 - v_N)),
        (i_N, right_N, (1 - u_N) * v_N),
        (below_N, j_N, u_N * (1 - v_N)),
        (below_N, right_N, u_N * v_N),
    )
    parts = [
        table_SD[row_N * side + column_N].astype(jnp.float32) * share_N[:, None]
        for row_N, column_N, share_N in corners
    ]
    return sum(parts[1:], start=parts[0]).astype(table_SD.dtype)


def _neighbour(place_N: Array, count: Array, side: int) -> tuple[Array, Array]:
    """Return the table's place at or before each patch, and how far the patch is on the way to the next."""
    last = jnp.maximum(count - 1, 1)
    scaled_N = jnp.minimum(place_N, last) * (side - 1)
    return scaled_N // last, (scaled_N % last).astype(jnp.float32) / last.astype(jnp.float32)
