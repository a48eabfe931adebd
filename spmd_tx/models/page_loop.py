"""Attention from one token per row to its row's pages, for CPUs: row by row, a few pages at a time.

If all rows' pages were gathered first, the copy would cost more than the attention, and every row as much as
the longest one. Here each row reads its own pages once. The sum over pages is rescaled when a higher score is
found (Milakov and Gimelshein 2018), so positions after a row's last token add exactly nothing.

Dimension key as in kv_cache.py; W tokens in a block of pages, X all key-value heads side by side (K times E).
"""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from spmd_tx.sharding.collectives import varying

BLOCK_PAGES = 8  # pages read at once
LOWEST = -1e30  # a large finite number, as in attention.attend_keys


def attend_row_by_row(
    q_BNE: Float[Array, "B N E"],
    pools_LPSKE: tuple[Array, Array],
    index: Array,
    tables_BN: Int[Array, "B _"],
    positions_B: Int[Array, " B"],
) -> Float[Array, "B N E"]:
    """Attend from each row's token to the tokens up to its position; the pools hold keys and values.

    A row that nobody reads has position -1: it costs next to nothing, and its result is zero.
    """
    _, n, e = q_BNE.shape
    page_size, heads = pools_LPSKE[0].shape[2:4]
    block_pages = min(BLOCK_PAGES, tables_BN.shape[1])
    width = block_pages * page_size
    tables_BN = jnp.pad(tables_BN, ((0, 0), (0, -tables_BN.shape[1] % block_pages)))
    own_NK = jnp.arange(n)[:, None] // (n // heads) == jnp.arange(heads)[None]

    def read(pool: Array, pages: Array) -> Array:
        """Return [W, X], sliced page by page: slices copy memory blocks, a gather copies value by value."""
        size = (1, 1, *pool.shape[2:])
        places = range(block_pages)
        slices = [lax.dynamic_slice(pool, (index, pages[place], 0, 0, 0), size) for place in places]
        return jnp.concatenate(slices, axis=1).reshape(width, heads * e)

    def row(inputs: tuple[Array, Array, Array]) -> Array:
        q_NE, table_N, position = inputs
        # Zeros for the other heads' keys let one product serve all heads.
        q_NX = jnp.where(own_NK[:, :, None], q_NE[:, None], jnp.zeros((), q_NE.dtype)).reshape(n, heads * e)

        def block(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            highest_N, total_N, sum_NX = carry
            pages = lax.dynamic_slice(table_N, (number * block_pages,), (block_pages,))
            keys_WX, values_WX = (read(pool, pages) for pool in pools_LPSKE)
            is_there_W = number * width + jnp.arange(width) <= position
            # A page's earlier owner may have left infinities, and zero times infinity is not zero.
            values_WX = jnp.where(is_there_W[:, None], values_WX, jnp.zeros((), values_WX.dtype))
            scores_NW = jnp.einsum("NX,WX->NW", q_NX, keys_WX, preferred_element_type=jnp.float32) * e**-0.5
            scores_NW = jnp.where(is_there_W[None], scores_NW, LOWEST)
            new_highest_N = jnp.maximum(highest_N, jnp.max(scores_NW, axis=1))
            scale_N = jnp.exp(highest_N - new_highest_N)
            shares_NW = jnp.exp(scores_NW - new_highest_N[:, None])
            added_NX = jnp.einsum(
                "NW,WX->NX", shares_NW.astype(values_WX.dtype), values_WX, preferred_element_type=jnp.float32
            )
            total_N = total_N * scale_N + jnp.sum(shares_NW, axis=1)
            return new_highest_N, total_N, sum_NX * scale_N[:, None] + added_NX

        nothing = (jnp.full(n, LOWEST), jnp.zeros(n), jnp.zeros((n, heads * e)))
        start = tuple(varying(x) for x in nothing)
        _, total_N, sum_NX = lax.fori_loop(0, (position + width) // width, block, start)
        mine_NE = jnp.sum(jnp.where(own_NK[:, :, None], sum_NX.reshape(n, heads, e), 0.0), axis=1)
        return (mine_NE / jnp.maximum(total_N, 1.0)[:, None]).astype(q_NE.dtype)  # the highest score adds 1

    return lax.map(row, (q_BNE, tables_BN, positions_B))
