"""Attention to the pages of a row, a few pages at a time, at a cost that the width of tables does not change.

The sum over pages is rescaled when a higher score is found (Milakov and Gimelshein 2018), so positions after
a token add exactly nothing. Blocks of pages begin at fixed positions: a token's result has the same bits
however wide the tables are, and whatever else its row or other rows hold.

Dimension key as in kv_cache.py; W tokens in a block of pages, G query heads per key-value head.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from spmd_tx.hlo.hints import usual_turns
from spmd_tx.sharding.collectives import varying

Pools = tuple[Array, Array | None]  # keys and values [L, P, S, X]; None: the keys are the values, too

BLOCK_PAGES = 8  # pages read at once for one token per row
SEVERAL_PAGES = 16  # the same for several tokens per row
USUAL_TOKENS = 2048  # that a row is taken to have where costs are estimated
LOWEST = -1e30  # finite, not -inf: rows of pure padding must stay finite


def attend_row_by_row(
    q_BNE: Float[Array, "B N E"],
    pools_LPSX: Pools,
    index: Array,
    tables_BN: Int[Array, "B _"],
    positions_B: Int[Array, " B"],
    *,
    sinks_N: Float[Array, " N"] | None = None,
    window: int = 0,
) -> Float[Array, "B N E"]:
    """Attend from each row's token to the tokens up to its position.

    For CPUs: each row reads its own pages once. If all rows' pages were gathered first, the copy would cost
    more than the attention, and every row as much as the longest one.

    A row that nobody reads has position -1: it costs next to nothing, and its result is zero. Sinks and the
    window are those of blockwise_attention.attend_segments; pages before the window are not read.
    """
    _, n, e = q_BNE.shape
    page_size, heads = pools_LPSX[0].shape[2], pools_LPSX[0].shape[3] // e
    block_pages = min(BLOCK_PAGES, tables_BN.shape[1])
    width = block_pages * page_size
    tables_BN = jnp.pad(tables_BN, ((0, 0), (0, -tables_BN.shape[1] % block_pages)))
    own_NK = jnp.arange(n)[:, None] // (n // heads) == jnp.arange(heads)[None]

    def read(pool: Array, pages: Array) -> Array:
        """Return [W, X], sliced page by page: slices copy memory blocks, a gather copies value by value."""
        size = (1, 1, *pool.shape[2:])
        places = range(block_pages)
        slices = [lax.dynamic_slice(pool, (index, pages[place], 0, 0), size) for place in places]
        return jnp.concatenate(slices, axis=1).reshape(width, heads * e)

    def row(inputs: tuple[Array, Array, Array]) -> Array:
        q_NE, table_N, position = inputs
        # Zeros for the other heads' keys let one product serve all heads.
        q_NX = jnp.where(own_NK[:, :, None], q_NE[:, None], jnp.zeros((), q_NE.dtype)).reshape(n, heads * e)

        def block(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            highest_N, total_N, sum_NX = carry
            pages = lax.dynamic_slice(table_N, (number * block_pages,), (block_pages,))
            keys_WX = read(pools_LPSX[0], pages)
            values_WX = keys_WX if pools_LPSX[1] is None else read(pools_LPSX[1], pages)
            order_W = number * width + jnp.arange(width)
            is_there_W = order_W <= position
            if window:
                is_there_W &= order_W > position - window
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

        highest_N, total_N = _beginning(sinks_N, (n,))
        start = tuple(varying(x) for x in (highest_N, total_N, jnp.zeros((n, heads * e))))
        first = jnp.maximum(position - window + 1, 0) // width if window else 0
        _, total_N, sum_NX = lax.fori_loop(first, (position + width) // width, block, start)
        mine_NE = jnp.sum(jnp.where(own_NK[:, :, None], sum_NX.reshape(n, heads, e), 0.0), axis=1)
        return (mine_NE / jnp.maximum(total_N, 1.0)[:, None]).astype(q_NE.dtype)  # the highest score adds 1

    return lax.map(row, (q_BNE, tables_BN, positions_B))


def attend_pages(
    q_BTNE: Float[Array, "B T N E"],
    pools_LPSX: Pools,
    index: Array,
    tables_BN: Int[Array, "B _"],
    positions_BT: Int[Array, "B T"],
    *,
    sinks_N: Float[Array, " N"] | None = None,
    window: int = 0,
) -> Float[Array, "B T N E"]:
    """Attend from all tokens of a row to the tokens up to their positions; all rows at once.

    It reads as many pages of every row as the highest position needs, or with a window, as the lowest and the
    highest one. Sinks and the window are those of blockwise_attention.attend_segments.
    """
    b, t, n, e = q_BTNE.shape
    page_size, heads = pools_LPSX[0].shape[2], pools_LPSX[0].shape[3] // e
    block_pages = min(SEVERAL_PAGES, tables_BN.shape[1])
    width = block_pages * page_size
    tables_BN = jnp.pad(tables_BN, ((0, 0), (0, -tables_BN.shape[1] % block_pages)))
    q_BKGTE = q_BTNE.reshape(b, t, heads, n // heads, e).transpose(0, 2, 3, 1, 4)
    q_BKQE = q_BKGTE.reshape(b, heads, n // heads * t, e)
    positions_BQ = jnp.tile(positions_BT, (1, n // heads))

    def read(pool: Array, pages: Array) -> Array:
        """Return [B, K, W, E]."""
        paged = pool[index, pages]  # [B, N, S, X]
        return paged.reshape(b, width, heads, e).swapaxes(1, 2)

    def block(number: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        highest, total, summed = carry
        pages = lax.dynamic_slice_in_dim(tables_BN, number * block_pages, block_pages, axis=1)
        keys = read(pools_LPSX[0], pages)
        values = keys if pools_LPSX[1] is None else read(pools_LPSX[1], pages)
        order_W = number * width + jnp.arange(width)
        is_seen_BQW = order_W[None, None] <= positions_BQ[:, :, None]
        if window:
            is_seen_BQW &= order_W[None, None] > positions_BQ[:, :, None] - window
        # A page's earlier owner may have left infinities, and zero times infinity is not zero.
        is_there_BW = jnp.any(is_seen_BQW, axis=1)
        values = jnp.where(is_there_BW[:, None, :, None], values, jnp.zeros((), values.dtype))
        scores = jnp.einsum("BKQE,BKWE->BKQW", q_BKQE, keys, preferred_element_type=jnp.float32) * e**-0.5
        scores = jnp.where(is_seen_BQW[:, None], scores, LOWEST)
        new_highest = jnp.maximum(highest, jnp.max(scores, axis=-1))
        scale = jnp.exp(highest - new_highest)
        shares = jnp.exp(scores - new_highest[..., None])
        added = jnp.einsum(
            "BKQW,BKWE->BKQE", shares.astype(values.dtype), values, preferred_element_type=jnp.float32
        )
        total = total * scale + jnp.sum(shares, axis=-1)
        return new_highest, total, summed * scale[..., None] + added

    sinks_1KQ = None
    if sinks_N is not None:
        sinks_1KQ = jnp.repeat(sinks_N.reshape(1, heads, n // heads), t, axis=2)
    highest, total = _beginning(sinks_1KQ, q_BKQE.shape[:3])
    start = tuple(varying(x) for x in (highest, total, jnp.zeros(q_BKQE.shape)))
    last = jnp.max(positions_BT)
    lowest = jnp.min(jnp.where(positions_BT < 0, last, positions_BT))  # of the tokens that see anything
    first = jnp.maximum(lowest - window + 1, 0) // width if window else 0
    usual = min(USUAL_TOKENS, window + t if window else USUAL_TOKENS, tables_BN.shape[1] * page_size)
    with jax.named_scope(usual_turns(-(-usual // width))):
        _, total, summed = lax.fori_loop(first, last // width + 1, block, start)
    y_BKGTE = (summed / jnp.maximum(total, 1.0)[..., None]).reshape(q_BKGTE.shape)
    return y_BKGTE.transpose(0, 3, 1, 2, 4).reshape(b, t, n, e).astype(q_BTNE.dtype)


def _beginning(sinks: Array | None, shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Return the highest score and the sum of shares before anything was read: those of the sinks."""
    if sinks is None:
        return jnp.full(shape, LOWEST), jnp.zeros(shape)
    return jnp.broadcast_to(sinks.astype(jnp.float32), shape), jnp.ones(shape)
