"""How the tokens of a row are divided into parts, and which rows share one.

What a part of a row gives follows from the part's pages and the row's query. Rows whose pages there are the
same, as samples of one prompt and followers of one sequence have them, can read it together (cascade
attention, Ye et al. 2024). Borders of parts follow from a row's length alone, and are the same for rows of
similar lengths.

Dimension key as in queries.py; U part, M row that reads a part together with others, C another row.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

from spmd_tx.sharding.tree_node import TreeNode

FINE = 8  # blocks of a part; longer ones grow in steps of an eighth to a quarter of their length


@dataclass(frozen=True)
class RowParts:
    """Divides the tokens that rows see."""

    most: int  # parts of a row
    block: int  # tokens that are read at once
    least: int  # blocks of a part, at least; a power of two
    blocks: int  # of the longest row
    window: int = 0

    def of(self, last: Array, before: Array) -> tuple[Array, Array, Array, Array]:
        """Return the first block, the one behind the last, the blocks of a part, and how many parts it makes.

        ``last`` is a row's last position, -1 if nobody reads it. With a window, nothing is seen up to
        ``before``.
        """
        end = (last + self.block) // self.block
        first = jnp.maximum(before + 1, 0) // self.block if self.window else jnp.zeros_like(end)
        each = jnp.maximum((end - first + self.most - 1) // self.most, self.least)
        step, bound = jnp.ones_like(each), FINE
        while self.most * bound < self.blocks:
            step = jnp.where(each > bound, 2 * bound // FINE, step)
            bound *= 2
        each = (each + step - 1) // step * step
        return first, end, each, jnp.maximum((end - first + each - 1) // each, 1)


class CommonParts(TreeNode):
    """Says which rows read a part together: the first of them for all."""

    rows: Any  # int32 [B, U, M]: the rows for which a row reads its part, itself first and in place of none
    counts: Any  # int32 [B, U]: how many they are. 0: another row reads the part, or there is no such part


def shared_parts(
    parts: RowParts, page_size: int, tables_BN: Int[Array, "B N"], lasts_B: Int[Array, " B"], most: int
) -> CommonParts:
    """Find the parts that up to ``most`` rows read together: all have all of the part's pages, and see them.

    ``lasts_B`` are the rows' last positions, -1 where nobody reads a row; there must be no window.
    """
    b, n = tables_BN.shape
    own_B, numbers_U = jnp.arange(b, dtype=jnp.int32), jnp.arange(parts.most, dtype=jnp.int32)
    own_BU = jnp.broadcast_to(own_B[:, None], (b, parts.most))
    _, _, each_B, used_B = parts.of(lasts_B, jnp.full_like(lasts_B, -1))
    pages_B1 = (each_B * (parts.block // page_size))[:, None]  # of a part
    ends_BU = (numbers_U[None] + 1) * pages_B1
    is_whole_BU = ends_BU * page_size <= lasts_B[:, None] + 1
    last_pages_BU = jnp.take_along_axis(tables_BN, jnp.minimum(ends_BU, n) - 1, axis=1)

    is_alike_BCU = is_whole_BU[:, None] & is_whole_BU[None] & (each_B[:, None] == each_B[None])[:, :, None]
    is_alike_BCU &= last_pages_BU[:, None] == last_pages_BU[None]
    leaders_BU = jnp.min(jnp.where(is_alike_BCU, own_B[None, :, None], b), axis=1)
    leaders_BU = jnp.where(is_whole_BU, leaders_BU, own_BU)
    # Whoever has another page than its leader somewhere in the part reads the part itself.
    part_BN = jnp.arange(n)[None] // pages_B1
    leaders_BN = jnp.take_along_axis(leaders_BU, jnp.minimum(part_BN, parts.most - 1), axis=1)
    differs_BN = tables_BN != tables_BN[leaders_BN, jnp.arange(n)[None]]
    differs_BU = jnp.any(differs_BN[:, None] & (part_BN[:, None] == numbers_U[None, :, None]), axis=2)
    leaders_BU = jnp.where(differs_BU, own_BU, leaders_BU)

    is_same_BCU = leaders_BU[:, None] == leaders_BU[None]
    ranks_BU = jnp.sum(is_same_BCU & (own_B[None] < own_B[:, None])[:, :, None], axis=1, dtype=jnp.int32)
    places_BU = ranks_BU % most
    is_first_BCU = is_same_BCU & (ranks_BU[None] == (ranks_BU - places_BU)[:, None])
    firsts_BU = jnp.min(jnp.where(is_first_BCU, own_B[None, :, None], b), axis=1)
    rows_BUM = jnp.broadcast_to(own_BU[..., None], (b, parts.most, most))
    rows_BUM = rows_BUM.at[firsts_BU, numbers_U[None], places_BU].set(own_BU, unique_indices=True)
    behind_BU = jnp.sum(is_same_BCU, axis=1, dtype=jnp.int32) - ranks_BU
    reads_BU = (places_BU == 0) & (numbers_U[None] < used_B[:, None])
    return CommonParts(rows_BUM, jnp.where(reads_BU, jnp.minimum(behind_BU, most), 0))
