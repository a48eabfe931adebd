"""What a sample has in its row of every Decode. It never changes, so it is encoded once. Pure."""

from collections.abc import Mapping
from functools import cache, lru_cache

import numpy as np

from spmd_tx.protocol.commands import STOP_TOKENS

# By the names of Decode's fields
ROW_SETTINGS = np.dtype(
    [
        ("seeds", np.uint32, (2,)),
        ("temperatures", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("stop_tokens", np.int32, (STOP_TOKENS,)),
    ]
)
NO_TOKEN = -1


def row_settings(
    seeds: tuple[int, int], temperature: float, top_k: int, top_p: float, stop_tokens: list[int]
) -> bytes:
    """Return a record of ROW_SETTINGS. ``stop_tokens`` are STOP_TOKENS."""
    return np.array((seeds, temperature, top_k, top_p, stop_tokens), ROW_SETTINGS).tobytes()


@cache
def of_nobody(vocab_size: int) -> bytes:
    """Return the record of an empty row."""
    return row_settings((0, 0), 1.0, vocab_size, 1.0, [NO_TOKEN] * STOP_TOKENS)


@lru_cache(maxsize=8)  # most Decodes have the rows of the one before
def settings_columns(of_rows: tuple[bytes, ...]) -> Mapping[str, np.ndarray]:
    """Return the fields of a Decode whose rows have these records. They are read-only."""
    table = np.frombuffer(b"".join(of_rows), ROW_SETTINGS)
    columns = {name: np.ascontiguousarray(table[name]) for name in ROW_SETTINGS.names or ()}
    for column in columns.values():
        column.flags.writeable = False
    return columns
