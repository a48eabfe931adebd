"""The host's part of page tables that stay on the device: what a Decode changes of them.

Dimension key as in protocol/commands.py; U entries that one call takes, over all data shards.
"""

from collections.abc import Iterator

import numpy as np

from spmd_tx.protocol.commands import Decode
from spmd_tx.worker.steps.pages import TABLE_ENTRIES


def table_changes(command: Decode, shards: int, rows: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the arguments ``source`` and ``entries`` of make_place_tables for each call that a Decode needs.

    ``rows`` is the number of rows of a data shard in the tables; a command may have fewer.
    """
    source = np.full((shards, rows), -1, np.int32)
    of_command = command.source.reshape(shards, -1)
    source[:, : of_command.shape[1]] = of_command
    moves = bool(((source >= 0) & (source != np.arange(rows))).any())
    counts, width = command.page_counts, of_command.shape[1]
    row = np.repeat(np.arange(counts.size), counts)
    # By rows: the place of a page in its table, less its place in the command.
    beyond = command.page_places + counts - np.cumsum(counts)
    entries = np.empty((row.size, 3), np.int32)
    entries[:, 0], entries[:, 2] = row % width, command.pages
    entries[:, 1] = np.arange(row.size) + beyond[row]
    per_shard = counts.reshape(shards, width).sum(axis=1)
    ends = np.cumsum(per_shard)
    calls = max(int(moves), -(-int(per_shard.max()) // TABLE_ENTRIES))
    for number in range(calls):
        # Entries that say nothing: each has a row of its own beyond the last.
        some = np.zeros((shards, TABLE_ENTRIES, 3), np.int32)
        some[:, :, 0] = rows + np.arange(TABLE_ENTRIES)
        for shard, (end, count) in enumerate(zip(ends, per_shard, strict=True)):
            part = entries[end - count : end][number * TABLE_ENTRIES : (number + 1) * TABLE_ENTRIES]
            some[shard, : len(part)] = part
        yield (source if number == 0 else np.full_like(source, -1)).reshape(-1), some.reshape(-1, 3)
