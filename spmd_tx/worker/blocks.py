"""Cuts the rows of a command into blocks, and joins the replies of blocks.

A program runs on one block of few rows, and a command has any number of blocks: so one program serves
commands of all sizes, and what it computes of a row does not depend on how many there are.
Dimension key as in protocol/commands.py: B row, over all data shards.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from spmd_tx.sharding.tree_node import TreeNode, static


def blocks(tree: Any, shards: int, rows: int) -> Iterator[Any]:
    """Yield host arrays [B, ...] in parts of ``rows`` rows of every data shard; 0: all at once."""
    count = jax.tree.leaves(tree)[0].shape[0] // shards
    if not rows or count == rows:
        yield tree
        return
    assert count % rows == 0, f"{count} rows in blocks of {rows}"
    for start in range(0, count, rows):
        yield jax.tree.map(lambda x, start=start: _part(x, shards, start, rows), tree)


def _part(x: np.ndarray, shards: int, start: int, rows: int) -> np.ndarray:
    by_shard = x.reshape(shards, x.shape[0] // shards, *x.shape[1:])
    return by_shard[:, start : start + rows].reshape(shards * rows, *x.shape[1:])


class Joined(TreeNode):
    """Holds an array whose blocks are computed one after the other, perhaps still. np.asarray joins them.

    Blocks follow each other along the rows of every data shard, and the pieces of a block along the next
    dimension. A block that was not computed, None, is zeros.
    """

    parts: Sequence[Any]  # of each block, with the rows of all data shards along ``axis``
    shards: int = static()
    axis: int = static()
    pieces: int = static()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        known = next(np.asarray(part) for part in self.parts if part is not None)
        parts = [np.zeros_like(known) if part is None else np.asarray(part) for part in self.parts]
        whole = [
            np.concatenate(parts[start : start + self.pieces], axis=self.axis + 1)
            if self.pieces > 1
            else parts[start]
            for start in range(0, len(parts), self.pieces)
        ]
        before, after = whole[0].shape[: self.axis], whole[0].shape[self.axis + 1 :]
        rows = [each.shape[self.axis] // self.shards for each in whole]
        by_shard = [
            each.reshape(*before, self.shards, count, *after) for each, count in zip(whole, rows, strict=True)
        ]
        array = np.concatenate(by_shard, axis=self.axis + 1)
        array = array.reshape(*before, self.shards * sum(rows), *after)
        return array if dtype is None else array.astype(dtype)


def joined(
    replies: Sequence[Mapping[str, Any] | None], shards: int, *, axis: int = 0, pieces: int = 1
) -> dict[str, Any]:
    """Join the arrays of the replies to a command's blocks, by name. None: a block was not computed."""
    known = next((reply for reply in replies if reply is not None), None)
    if known is None:
        return {}
    if len(replies) == 1:
        return dict(known)
    return {
        name: Joined([None if reply is None else reply[name] for reply in replies], shards, axis, pieces)
        for name in known
    }
