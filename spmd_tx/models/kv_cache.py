"""Paged keys and values of the sequences being sampled (Kwon et al. 2023).

Dimension key: L layer, P page (of one data shard), S place in a page, K key-value head, E head width,
B row, T token, N pages in a row's table, C page to copy.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax.struct import PyTreeNode
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Int

from spmd_tx.models.attention import attend_keys, segment_attention
from spmd_tx.models.config import ModelConfig
from spmd_tx.models.forward_pass import Attend
from spmd_tx.models.page_loop import attend_pages, attend_row_by_row
from spmd_tx.sharding.mesh import DATA, EP, FSDP, TP, AnyMesh
from spmd_tx.sharding.weight import Weight

TRASH_PAGE = 0  # in place of the pages of tokens whose keys and values nobody reads
MOST_SCORES = 1 << 22  # scores of one head held at once: tokens of the rows times tokens that they see


class KvCache(PyTreeNode):
    """Holds keys and values [L, P, S, K, E]; every data shard has its own pages."""

    keys: Any
    values: Any


def cache_weights(model: ModelConfig, mesh: AnyMesh, pages: int, page_size: int, dtype: DTypeLike) -> KvCache:
    """Declare a cache with ``pages`` pages per data shard."""
    heads = max(model.n_kv_heads, mesh.shape[TP])  # with fewer heads than tp, each device keeps its own
    shape = (
        model.declared.n_paged,
        pages * mesh.shape[FSDP] * mesh.shape[EP],
        page_size,
        heads,
        model.head_dim,
    )
    pool = Weight(shape, P(None, DATA, None, TP, None), dtype)
    return KvCache(pool, pool)


def write(cache: KvCache, index: Array, pages: Array, places: Array, k: Array, v: Array) -> KvCache:
    """Write one layer's keys and values at (page, place); ``pages`` and ``places`` have k's leading shape.

    No two of them may be the same, except on page 0, to which nothing is written.
    """
    pages = _without_trash(pages, cache.keys.shape[1])

    def put(pool: Array, new: Array) -> Array:
        return pool.at[index, pages, places].set(new, unique_indices=True, mode="drop")

    return KvCache(put(cache.keys, k), put(cache.values, v))


def _without_trash(pages: Array, count: int) -> Array:
    """Replace page 0 by distinct numbers from ``count`` on, which a scatter with mode "drop" leaves out.

    So all indices of the scatter are unique. Of others, a deterministic XLA for GPUs sorts the flattened
    32-bit indices to find which of several writes comes last: slowly, and in a pool of more than 2**32
    numbers it takes some different indices for the same, and loses a write.
    """
    beyond = count + jnp.arange(pages.size, dtype=pages.dtype).reshape(pages.shape)
    return jnp.where(pages == TRASH_PAGE, beyond, pages)


def prefill_attend(
    implementation: str,
    segments_BT: Int[Array, "B T"],
    pages_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
) -> Attend:
    """Attend as in training, and write every token's keys and values to its page."""
    attention = segment_attention(implementation, segments_BT)

    def attend(
        index: Array, q: Array, k: Array, v: Array, cache: KvCache, **sight: Any
    ) -> tuple[Array, KvCache]:
        cache = write(cache, index, pages_BT, positions_BT % cache.keys.shape[2], k, v)
        return attention(q, k, v, **sight), cache

    return attend


def continue_attend(
    tables_BN: Int[Array, "B N"],
    pages_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
    *,
    in_loop: bool = False,
) -> Attend:
    """Write every token's keys and values to its page, then attend to the row's tokens up to it.

    Each row has one segment, whose first tokens may have been written before. With ``in_loop`` pages are read
    a few at a time, else all at once; then, where there are many scores, the queries are processed in blocks.
    """

    def attend(
        index: Array, q: Array, k: Array, v: Array, cache: KvCache, **sight: Any
    ) -> tuple[Array, KvCache]:
        cache = write(cache, index, pages_BT, positions_BT % cache.keys.shape[2], k, v)
        if in_loop or sight:
            return attend_pages(q, (cache.keys, cache.values), index, tables_BN, positions_BT, **sight), cache
        order_S = jnp.arange(tables_BN.shape[1] * cache.keys.shape[2])
        # A page's earlier owner may have left infinities, and zero times infinity is not zero.
        is_written_BS = order_S[None] <= jnp.max(positions_BT, axis=1, keepdims=True)
        keys = _row_keys(cache.keys, index, tables_BN)
        values = _row_keys(cache.values, index, tables_BN)
        values = jnp.where(is_written_BS[:, :, None, None], values, jnp.zeros((), v.dtype))

        def block(some: tuple[Array, Array]) -> Array:
            q_BQNE, positions_BQ = some
            return attend_keys(q_BQNE, keys, values, order_S[None, None] <= positions_BQ[:, :, None])

        b, t, n, e = q.shape
        blocks = 1
        while blocks < t and b * (t // blocks) * order_S.size > MOST_SCORES:
            blocks *= 2
        if blocks == 1:
            return block((q, positions_BT)), cache
        queries = q.reshape(b, blocks, t // blocks, n, e).swapaxes(0, 1)
        positions = positions_BT.reshape(b, blocks, t // blocks).swapaxes(0, 1)
        return lax.map(block, (queries, positions)).swapaxes(0, 1).reshape(b, t, n, e), cache

    return attend


def _row_keys(pool: Array, index: Array, tables_BN: Array) -> Array:
    """Return one layer's keys or values in the order of a row's positions."""
    paged = pool[index, tables_BN]  # [B, N, S, K, E]
    return paged.reshape(paged.shape[0], -1, *paged.shape[3:])


def decode_attend(
    tables_BN: Int[Array, "B N"],
    positions_B: Int[Array, " B"],
    is_alive_B: Array,
    *,
    row_by_row: bool,
    in_loop: bool = False,
) -> Attend:
    """Write one token per row, then attend to all the row's tokens up to it.

    ``row_by_row`` is for CPUs. Elsewhere pages are read a few at a time if ``in_loop``, else all at once.
    """

    def attend(
        index: Array, q: Array, k: Array, v: Array, cache: KvCache, **sight: Any
    ) -> tuple[Array, KvCache]:
        page_size = cache.keys.shape[2]
        page_B = jnp.take_along_axis(tables_BN, (positions_B // page_size)[:, None], axis=1)[:, 0]
        page_B = jnp.where(is_alive_B, page_B, TRASH_PAGE)
        cache = write(cache, index, page_B, positions_B % page_size, k[:, 0], v[:, 0])
        if row_by_row:
            pools = (cache.keys, cache.values)
            last_B = jnp.where(is_alive_B, positions_B, -1)
            return attend_row_by_row(q[:, 0], pools, index, tables_BN, last_B, **sight)[:, None], cache

        if in_loop or sight:
            pools = (cache.keys, cache.values)
            return attend_pages(q, pools, index, tables_BN, positions_B[:, None], **sight), cache

        order_T = jnp.arange(tables_BN.shape[1] * page_size)
        mask_BT = order_T[None] <= positions_B[:, None]
        # A page's earlier owner may have left infinities, and zero times infinity is not zero.
        values = jnp.where(
            mask_BT[:, :, None, None], _row_keys(cache.values, index, tables_BN), jnp.zeros((), v.dtype)
        )
        return attend_keys(q, _row_keys(cache.keys, index, tables_BN), values, mask_BT[:, None]), cache

    return attend


def copy_pages(cache: KvCache, copies_C2: Int[Array, "C 2"], at_once: int = 1) -> KvCache:
    """Copy pages (from, to) in all layers. Pairs with page 0 at the end cost nothing.

    No page may be copied to twice, or both from and to. ``at_once`` pages are copied by one operation: one is
    best where loops cost little, as on TPUs, on which a scatter of whole pages would copy the pools.
    """
    copies_C2 = jnp.pad(copies_C2, ((0, -copies_C2.shape[0] % at_once), (0, 0)))
    order_C = jnp.arange(copies_C2.shape[0])
    count = jnp.max(jnp.where(copies_C2[:, 1] != TRASH_PAGE, order_C + 1, 0))

    def some(number: Array, cache: KvCache) -> KvCache:
        source, target = lax.dynamic_slice_in_dim(copies_C2, number * at_once, at_once).T
        if at_once == 1:
            return jax.tree.map(partial(_copy_page, source=source[0], target=target[0]), cache)
        target = _without_trash(target, cache.keys.shape[1])

        def copy(pool: Array) -> Array:
            return pool.at[:, target].set(pool[:, source], unique_indices=True, mode="drop")

        return jax.tree.map(copy, cache)

    return lax.fori_loop(0, (count + at_once - 1) // at_once, some, cache)


def _copy_page(pool: Array, source: Array, target: Array) -> Array:
    page = lax.dynamic_slice_in_dim(pool, source, 1, axis=1)
    return lax.dynamic_update_slice_in_dim(pool, page, target, axis=1)
