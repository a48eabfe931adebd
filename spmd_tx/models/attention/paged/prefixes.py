"""Which rows begin with the same pages, and in what order a kernel for TPUs takes rows.

A core of a TPU goes through the rows one after the other, so rows that begin with the same pages, as samples
of one prompt do, come next to each other: the first of them reads those pages for all (cascade attention, Ye
et al. 2024).

Dimension key as in queries.py; C another row, J block of a row, P page of a block, I row in the new order.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

from spmd_tx.sharding.tree_node import TreeNode


class PrefixGroups(TreeNode):
    """Says which rows read their first blocks together: one of a group for all, in the new order."""

    rows: Any  # int32 [I]: the rows, those of a group next to each other
    members: Any  # int32 [I]: how many rows the group has that begins here; 0: none does
    places: Any  # int32 [I]: of the row in its group
    blocks: Any  # int32 [I]: how many blocks of pages the group reads together


def prefix_groups(
    pages: int, page_size: int, tables_BN: Int[Array, "B N"], lasts_B: Int[Array, " B"], most: int
) -> PrefixGroups:
    """Find groups of up to ``most`` rows that have the same pages in their first blocks of ``pages`` pages.

    ``lasts_B`` are the rows' last positions, -1 where nobody reads a row. All of a group see more than what
    they read together.
    """
    b = tables_BN.shape[0]
    own_B = jnp.arange(b, dtype=jnp.int32)
    tables_BN = jnp.pad(tables_BN, ((0, 0), (0, -tables_BN.shape[1] % pages)))
    tables_BJP = tables_BN.reshape(b, -1, pages)
    numbers_J = jnp.arange(tables_BJP.shape[1], dtype=jnp.int32)
    before_B = jnp.maximum(lasts_B, 0) // (pages * page_size)  # blocks before the one of the last token
    is_before_BJ = numbers_J[None] < before_B[:, None]

    ends_BJ = jnp.where(is_before_BJ, tables_BJP[:, :, -1], -1 - own_B[:, None])  # of no other row
    common_BC = _leading(ends_BJ[:, None] == ends_BJ[None], numbers_J)
    is_other_BC = own_B[:, None] != own_B[None]
    common_B = jnp.max(jnp.where(is_other_BC, common_BC, 0), axis=1)
    first_B = jnp.min(jnp.where(common_BC >= common_B[:, None], own_B[None], b), axis=1)
    # Rows whose last pages of blocks are the first one's may have others within.
    is_same_BJ = jnp.all(tables_BJP == tables_BJP[first_B], axis=2)
    is_common_B = (common_B > 0) & (_leading(is_same_BJ, numbers_J) >= common_B)
    common_B = jnp.where(is_common_B, common_B, 0)
    first_B = jnp.where(is_common_B, first_B, own_B)

    is_same_BC = (common_B[:, None] == common_B[None]) & (first_B[:, None] == first_B[None])
    is_earlier_BC = own_B[None] < own_B[:, None]
    ranks_B = jnp.sum(is_same_BC & is_earlier_BC, axis=1, dtype=jnp.int32)
    members_B = jnp.sum(is_same_BC, axis=1, dtype=jnp.int32)
    groups_B = jnp.min(jnp.where(is_same_BC, own_B[None], b), axis=1)  # by their first rows
    order_B = ranks_B + jnp.sum(groups_B[None] < groups_B[:, None], axis=1, dtype=jnp.int32)
    rows_I = jnp.zeros_like(own_B).at[order_B].set(own_B, unique_indices=True)
    places_B = ranks_B % most
    members_B = jnp.where(places_B == 0, jnp.minimum(members_B - ranks_B, most), 0)
    return PrefixGroups(rows_I, members_B[rows_I], places_B[rows_I], common_B[rows_I])


def _leading(is_so: Array, numbers_J: Array) -> Array:
    """Count how many are so before the first that is not."""
    return jnp.min(jnp.where(is_so, len(numbers_J), numbers_J), axis=-1).astype(jnp.int32)
