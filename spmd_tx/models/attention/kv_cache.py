"""Paged keys and values of the sequences being sampled (Kwon et al. 2023).

Dimension key: L layer, P page (of one data shard), S place in a page, K key-value head, E head width, X all
key-value heads side by side (K times E), B row, T token, N pages in a row's table, C page to copy.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Int

from spmd_tx.models.attention.chunk import ChunkTokens
from spmd_tx.models.attention.packed_rows import segment_attention
from spmd_tx.models.attention.page_loop import Pools
from spmd_tx.models.attention.paged.attention import paged_attention
from spmd_tx.models.declared.model import Model
from spmd_tx.models.forward_pass import Attend
from spmd_tx.protocol.kernels import Kernels
from spmd_tx.sharding.mesh import DATA, EP, FSDP, TP, AnyMesh
from spmd_tx.sharding.tree_node import TreeNode
from spmd_tx.sharding.weight import Weight

TRASH_PAGE = 0  # in place of the pages of tokens whose keys and values nobody reads


class KvCache(TreeNode):
    """Holds keys and values [L, P, S, X]; every data shard has its own pages.

    The heads of a token are one dimension, so that on TPUs, too, a page lies in memory as it is declared.
    """

    keys: Any
    values: Any  # None: the keys are the values, too, as in latent attention

    @property
    def pools(self) -> Pools:
        return self.keys, self.values


def cache_weights(model: Model, mesh: AnyMesh, pages: int, page_size: int, dtype: DTypeLike) -> KvCache:
    """Declare a cache with ``pages`` pages per data shard."""
    heads = max(model.n_kv_heads, mesh.shape[TP])  # with fewer heads than tp, each device keeps its own
    of_data = pages * mesh.shape[FSDP] * mesh.shape[EP]
    shape = (model.n_pools, of_data, page_size, heads * model.head_dim)
    pool = Weight(shape, P(None, DATA, None, TP), dtype)
    return KvCache(pool, pool if model.keeps_values else None)


def write(cache: KvCache, index: Array, pages: Array, places: Array, k: Array, v: Array) -> KvCache:
    """Write one layer's keys and values [..., K, E] at (page, place), which have their leading shape.

    ``v`` is not read where the keys are the values.

    No two of them may be the same, except on page 0, to which nothing is written.
    """
    pages = without_trash(pages, cache.keys.shape[1])

    def put(pool: Array, new: Array) -> Array:
        new = new.reshape(*pages.shape, pool.shape[3])
        return pool.at[index, pages, places].set(new, unique_indices=True, mode="drop")

    return KvCache(put(cache.keys, k), None if cache.values is None else put(cache.values, v))


def without_trash(pages: Array, count: int) -> Array:
    """Replace page 0 by distinct numbers from ``count`` on, which a scatter with mode "drop" leaves out.

    So all indices of the scatter are unique. Of others, a deterministic XLA for GPUs sorts the flattened
    32-bit indices to find which of several writes comes last: slowly, and in a pool of more than 2**32
    numbers it takes some different indices for the same, and loses a write.
    """
    beyond = count + jnp.arange(pages.size, dtype=pages.dtype).reshape(pages.shape)
    return jnp.where(pages == TRASH_PAGE, beyond, pages)


def prefill_attend(
    kernels: Kernels,
    segments_BT: Int[Array, "B T"],
    pages_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
) -> Attend:
    """Attend as in training, and write every token's keys and values to its page."""
    attention = segment_attention(kernels, segments_BT)

    def attend(
        index: Array, q: Array, k: Array, v: Array, cache: KvCache, **sight: Any
    ) -> tuple[Array, KvCache]:
        cache = write(cache, index, pages_BT, positions_BT % cache.keys.shape[2], k, v)
        return attention(q, k, v, **sight), cache

    return attend


def continue_attend(
    kernels: Kernels,
    tables_BN: Int[Array, "B N"],
    pages_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
) -> Attend:
    """Write every token's keys and values to its page, then attend to the row's tokens up to it.

    Each row has one segment, whose first tokens may have been written before.
    """

    def attend(
        index: Array, q: Array, k: Array, v: Array, cache: KvCache, **sight: Any
    ) -> tuple[Array, KvCache]:
        cache = write(cache, index, pages_BT, positions_BT % cache.keys.shape[2], k, v)
        return paged_attention(kernels, q, cache.pools, index, tables_BN, positions_BT, **sight), cache

    return attend


def decode_attend(
    kernels: Kernels,
    tables_BN: Int[Array, "B N"],
    positions_B: Int[Array, " B"],
    is_alive_B: Array,
    sharing: Callable[[Array, Array], dict[str, Any]] = lambda tables_BN, lasts_B: {},
    chunk: ChunkTokens | None = None,
) -> Attend:
    """Write one token per row, then attend to all the row's tokens up to it.

    What a dead row gets nobody reads. ``sharing`` says for all layers which rows read pages together, as
    that of paged/attention.py. Behind the rows come the tokens of a step's part of a chunk, one per row, too.
    """
    last_B = jnp.where(is_alive_B, positions_B, -1)
    shared, count = sharing(tables_BN, last_B), positions_B.shape[0]

    def attend(
        index: Array, q: Array, k: Array, v: Array, cache: KvCache, **sight: Any
    ) -> tuple[Array, KvCache]:
        page_size = cache.keys.shape[2]
        page_B = jnp.take_along_axis(tables_BN, (positions_B // page_size)[:, None], axis=1)[:, 0]
        page_B = jnp.where(is_alive_B, page_B, TRASH_PAGE)
        place_B = positions_B % page_size
        if chunk is not None:  # all are written before any attends, or XLA would copy the pools
            page_B = jnp.concatenate([page_B, chunk.pages[0]])
            place_B = jnp.concatenate([place_B, chunk.positions[0] % page_size])
        cache = write(cache, index, page_B, place_B, k[:, 0], v[:, 0])
        rows = tables_BN, last_B[:, None]
        y = paged_attention(kernels, q[:count], cache.pools, index, *rows, **sight, **shared)
        if chunk is None:
            return y, cache
        q_1CNE, where = q[count:].swapaxes(0, 1), (chunk.tables, chunk.positions)
        of_chunk = paged_attention(kernels, q_1CNE, cache.pools, index, *where, **sight)
        return jnp.concatenate([y, of_chunk.swapaxes(0, 1)]), cache

    return attend


def copy_pages(pools: Any, copies_C2: Int[Array, "C 2"], at_once: int = 1) -> Any:
    """Copy pages (from, to), or slots of states, in all layers. Pairs with page 0 at the end cost nothing.

    They are copied in order, ``at_once`` by one operation, in which no page may be copied to twice, or both
    from and to. One is best where loops cost little, as on TPUs, on which a scatter of whole pages would copy
    the pools.
    """
    copies_C2 = jnp.pad(copies_C2, ((0, -copies_C2.shape[0] % at_once), (0, 0)))
    order_C = jnp.arange(copies_C2.shape[0])
    count = jnp.max(jnp.where(copies_C2[:, 1] != TRASH_PAGE, order_C + 1, 0))

    def some(number: Array, pools: Any) -> Any:
        source, target = lax.dynamic_slice_in_dim(copies_C2, number * at_once, at_once).T
        if at_once == 1:
            return jax.tree.map(partial(_copy_page, source=source[0], target=target[0]), pools)

        def copy(pool: Array) -> Array:
            places = without_trash(target, pool.shape[1])
            return pool.at[:, places].set(pool[:, source], unique_indices=True, mode="drop")

        return jax.tree.map(copy, pools)

    return lax.fori_loop(0, (count + at_once - 1) // at_once, some, pools)


def _copy_page(pool: Array, source: Array, target: Array) -> Array:
    page = lax.dynamic_slice_in_dim(pool, source, 1, axis=1)
    return lax.dynamic_update_slice_in_dim(pool, page, target, axis=1)
