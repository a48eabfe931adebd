"""Decode's attention by cuDNN, which reads pages in place: a candidate that waits for being measured.

cuDNN's own page tables want as many pages as rows times table width. That holds for the pages of all layers
taken as one pool, if tables are made wide enough: no layer is copied, and no row becomes shorter.
"""

from typing import cast

import jax.numpy as jnp
from jax import Array


def attend_paged(
    q_BNE: Array, pools_LPSX: tuple[Array, Array], index: Array, tables_BN: Array, positions_B: Array
) -> Array:
    """What each row's token sees of the tokens up to its position: [B, N, E], as attend_row_by_row does.

    Layers times pages must be a multiple of the rows.
    """
    from jax._src.cudnn import fused_attention_stablehlo as cudnn  # no public function knows pages

    layers, pages, page_size, wide_heads = pools_LPSX[0].shape
    e = q_BNE.shape[2]
    rows, width = tables_BN.shape
    wide = layers * pages // rows
    if wide * rows != layers * pages or wide < width:
        raise ValueError(f"{layers} x {pages} pages cannot be told apart by {rows} tables of equal width")
    keys, values = (pool.reshape(layers * pages, page_size, wide_heads // e, e) for pool in pools_LPSX)
    table = jnp.pad(tables_BN + index * pages, ((0, 0), (0, wide - width)))[:, None, :, None]
    y_B1NE = cudnn.paged_attention(
        q_BNE[:, None],
        keys,
        values,
        jnp.ones(rows, jnp.int32),
        positions_B + 1,
        table,
        table,
        scale=q_BNE.shape[-1] ** -0.5,
        mask_type=cudnn.MaskType.PADDING,
    )
    return cast(Array, y_B1NE)[:, 0]
