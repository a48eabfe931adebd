"""The host's part of page tables that stay on the device: what a Decode changes of them.

Dimension key as in protocol/commands.py; U entries that one call takes, over all data shards.
"""

from collections.abc import Iterator
from functools import cache
from itertools import accumulate

import numpy as np

from spmd_tx.protocol.commands import Decode
from spmd_tx.worker.steps.pages import TABLE_ENTRIES


def table_changes(command: Decode, shards: int, rows: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the arguments ``source`` and ``entries`` of make_place_tables for each call that a Decode needs.

    ``rows`` is the number of rows of a data shard in the tables; a command may have fewer.
    """
    of_command, counts = command.source.reshape(shards, -1), command.page_counts
    width = of_command.shape[1]
    source = np.full((shards, rows), -1, np.int32)
    source[:, :width] = of_command
    moves = bool(((of_command >= 0) & (of_command != np.arange(width))).any())
    row = np.repeat(np.arange(counts.size), counts)
    # By rows: the place of a page in its table, less its place in the command.
    beyond = command.page_places + counts - np.cumsum(counts)
    entries = np.empty((row.size, 3), np.int32)
    entries[:, 0], entries[:, 2] = row % width, command.pages
    entries[:, 1] = np.arange(row.size) + beyond[row]
    per_shard = counts.reshape(shards, width).sum(axis=1).tolist()
    calls = max(int(moves), -(-max(per_shard) // TABLE_ENTRIES))
    for number in range(calls):
        some = _nothing(shards, rows, TABLE_ENTRIES).copy()
        for shard, (end, count) in enumerate(zip(accumulate(per_shard), per_shard, strict=True)):
            part = entries[end - count : end][number * TABLE_ENTRIES : (number + 1) * TABLE_ENTRIES]
            some[shard, : len(part)] = part
        yield (source if number == 0 else np.full_like(source, -1)).reshape(-1), some.reshape(-1, 3)


@cache
def _nothing(shards: int, rows: int, count: int) -> np.ndarray:
    """Return entries that say nothing: each has a row of its own beyond the last."""
    entries = np.zeros((shards, count, 3), np.int32)
    entries[:, :, 0] = rows + np.arange(count)
    return entries
