"""Steps that move what sequences keep: copies of pages and states, and entries of the tables of pages.

Dimension key: B row (over all data shards), N pages in a table, C copy, U entry.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from spmd_tx.models.attention.kv_cache import KvCache, copy_pages
from spmd_tx.models.linear_attention.state_pool import Keep, with_pages
from spmd_tx.sharding.mesh import DATA, platform
from spmd_tx.sharding.weight import Weight, specs

TABLE_ENTRIES = 1024  # of one data shard that one call writes
COPIES_AT_ONCE = 16  # pages, on GPUs, where every turn of a loop costs as much as copying several


def make_copy_pages(mesh: Mesh, cache: KvCache | Keep) -> Callable[..., Any]:
    """Make (cache, copies) -> cache, which copies pages (from, to), int32 [C, 2]. Donates ``cache``.

    The copies of each data shard come first among its pairs; the others are (0, 0).
    """
    at_once = COPIES_AT_ONCE if platform(mesh) == "gpu" else 1

    @partial(jax.jit, donate_argnums=0)
    @partial(jax.shard_map, mesh=mesh, in_specs=(specs(cache), P(DATA)), out_specs=specs(cache))
    def copy(cache: KvCache | Keep, copies: Array) -> KvCache | Keep:
        return with_pages(cache, lambda pages: copy_pages(pages, copies, at_once))

    return copy


def make_copy_states(mesh: Mesh, cache: KvCache | Keep) -> Callable[..., Any]:
    """Make (cache, copies) -> cache, which copies states (from, to), int32 [C, 2], in order.

    The copies of each data shard come first among its pairs; the others are (0, 0). Donates ``cache``.
    """

    @partial(jax.jit, donate_argnums=0)
    @partial(jax.shard_map, mesh=mesh, in_specs=(specs(cache), P(DATA)), out_specs=specs(cache))
    def copy(cache: Keep, copies: Array) -> Keep:
        return cache.replace(states=copy_pages(cache.states, copies))

    return copy


def make_place_tables(mesh: Mesh, tables: Weight) -> Callable[..., Any]:
    """Make (tables, source, entries) -> tables, those of the rows of a Decode. Donates ``tables`` [B, N].

    Row r begins as row ``source`` [B] of its data shard, if that is not negative. ``entries`` are (row, place
    in its table, page), int32 [U, 3]; U splits over the data shards like B. Entries without a page have
    different rows from the number of rows on.
    """
    in_specs = (tables.spec, P(DATA), P(DATA))

    @partial(jax.jit, donate_argnums=0)
    @partial(jax.shard_map, mesh=mesh, in_specs=in_specs, out_specs=tables.spec)
    def place(tables_BN: Array, source_B: Array, entries_U3: Array) -> Array:
        tables_BN = jnp.where(source_B[:, None] < 0, tables_BN, tables_BN[jnp.maximum(source_B, 0)])
        row_U, place_U, page_U = entries_U3.T
        return tables_BN.at[row_U, place_U].set(page_U, unique_indices=True, mode="drop")

    return place
