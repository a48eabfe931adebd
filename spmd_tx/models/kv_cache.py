"""Paged keys and values of the sequences being sampled (Kwon et al. 2023).

Dimension key: L layer, P page (of one data shard), S place in a page, K key-value head, E head width,
B row, T token, N pages in a row's table. Page 0 takes writes that nobody reads.
"""

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

MOST_SCORES = 1 << 22  # scores of one head held at once: tokens of the rows times tokens that they see


class KvCache(PyTreeNode):
    """Holds keys and values [L, P, S, K, E]; every data shard has its own pages."""

    keys: Any
    values: Any


def cache_weights(model: ModelConfig, mesh: AnyMesh, pages: int, page_size: int, dtype: DTypeLike) -> KvCache:
    """Declare a cache with ``pages`` pages per data shard."""
    heads = max(model.n_kv_heads, mesh.shape[TP])  # with fewer heads than tp, each device keeps its own
    shape = (model.n_layers, pages * mesh.shape[FSDP] * mesh.shape[EP], page_size, heads, model.head_dim)
    pool = Weight(shape, P(None, DATA, None, TP, None), dtype)
    return KvCache(pool, pool)


def write(cache: KvCache, index: Array, pages: Array, places: Array, k: Array, v: Array) -> KvCache:
    """Write one layer's keys and values at (page, place); ``pages`` and ``places`` have k's leading shape."""
    return KvCache(cache.keys.at[index, pages, places].set(k), cache.values.at[index, pages, places].set(v))


def prefill_attend(
    implementation: str,
    segments_BT: Int[Array, "B T"],
    pages_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
) -> Attend:
    """Attend as in training, and write every token's keys and values to its page."""
    attention = segment_attention(implementation, segments_BT)

    def attend(index: Array, q: Array, k: Array, v: Array, cache: KvCache) -> tuple[Array, KvCache]:
        cache = write(cache, index, pages_BT, positions_BT % cache.keys.shape[2], k, v)
        return attention(q, k, v), cache

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

    def attend(index: Array, q: Array, k: Array, v: Array, cache: KvCache) -> tuple[Array, KvCache]:
        cache = write(cache, index, pages_BT, positions_BT % cache.keys.shape[2], k, v)
        if in_loop:
            return attend_pages(q, (cache.keys, cache.values), index, tables_BN, positions_BT), cache
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

    def attend(index: Array, q: Array, k: Array, v: Array, cache: KvCache) -> tuple[Array, KvCache]:
        page_size = cache.keys.shape[2]
        page_B = jnp.take_along_axis(tables_BN, (positions_B // page_size)[:, None], axis=1)[:, 0]
        page_B = jnp.where(is_alive_B, page_B, 0)
        cache = write(cache, index, page_B, positions_B % page_size, k[:, 0], v[:, 0])
        if row_by_row:
            pools = (cache.keys, cache.values)
            last_B = jnp.where(is_alive_B, positions_B, -1)
            return attend_row_by_row(q[:, 0], pools, index, tables_BN, last_B)[:, None], cache

        if in_loop:
            pools = (cache.keys, cache.values)
            return attend_pages(q, pools, index, tables_BN, positions_B[:, None]), cache

        order_T = jnp.arange(tables_BN.shape[1] * page_size)
        mask_BT = order_T[None] <= positions_B[:, None]
        # A page's earlier owner may have left infinities, and zero times infinity is not zero.
        values = jnp.where(
            mask_BT[:, :, None, None], _row_keys(cache.values, index, tables_BN), jnp.zeros((), v.dtype)
        )
        return attend_keys(q, _row_keys(cache.keys, index, tables_BN), values, mask_BT[:, None]), cache

    return attend


def copy_pages(cache: KvCache, copies_C2: Int[Array, "C 2"]) -> KvCache:
    """Copy pages (from, to) in all layers."""
    source_C, target_C = copies_C2[:, 0], copies_C2[:, 1]
    return jax.tree.map(lambda pool: pool.at[:, target_C].set(pool[:, source_C]), cache)
