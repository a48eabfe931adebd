"""Collects what one Prefill does with the states of sequences: which it reads, writes and copies. Pure."""

from collections.abc import Sequence

import numpy as np

from spmd_tx.coordinator.sampling.cache.pages import TRASH_PAGE
from spmd_tx.protocol.commands import STATE_COPIES, PrefillStates

Copy = tuple[int, int]  # from, to: pages, or slots of states


class StateMoves:
    """Holds the copies of one Prefill, by data shard."""

    def __init__(self, shards: int, rows: int) -> None:
        """``rows`` are the rows of a Decode on each data shard."""
        self._rows = rows
        self._pages, self._before, self._after = ([list[Copy]() for _ in range(shards)] for _ in range(3))

    def __bool__(self) -> bool:
        return any(map(any, (self._pages, self._before, self._after)))

    def rows_left(self, shard: int) -> int:
        """Return how many samples may start, with two copies each after the rows are read, and one before."""
        after = -(-len(self._after[shard]) // STATE_COPIES)
        return self._rows - max(len(self._pages[shard]), len(self._before[shard]), after)

    def copy_first(self, shard: int, pages: Sequence[Copy], states: Sequence[Copy]) -> None:
        """Copy before anything is read."""
        self._pages[shard] += pages
        self._before[shard] += states

    def copy_last(self, shard: int, states: Sequence[Copy]) -> None:
        """Copy after all that is read, and after the copies of earlier calls."""
        self._after[shard] += states

    def of_rows(self, sources: np.ndarray, targets: np.ndarray) -> PrefillStates:
        """Build the part of the command; ``sources`` and ``targets`` int32 [B] are the slots of its rows."""
        states = STATE_COPIES * self._rows
        return PrefillStates(
            sources=sources,
            targets=targets,
            page_copies=copy_array(self._pages, self._rows),
            copies_before=copy_array(self._before, states),
            copies_after=copy_array(self._after, states),
        )


def copy_array(copies: Sequence[Sequence[Copy]], most: int) -> np.ndarray:
    """Return the copies of each data shard as int32 [C, 2], padded to ``most`` per shard."""
    array = np.full((len(copies), most, 2), TRASH_PAGE, np.int32)
    for shard, pairs in enumerate(copies):
        if pairs:
            array[shard, : len(pairs)] = pairs
    return array.reshape(-1, 2)
