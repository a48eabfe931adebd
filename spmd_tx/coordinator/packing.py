"""First-fit decreasing: segments into rows of one length, rows into micro-batches of few sizes. Pure.

Everything here follows from one request alone, so that its gradient does not depend on the company it is in.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spmd_tx.protocol import SEGMENTS_PER_ROW

SHORTEST_ROW = 64  # tokens
LONGER_ROW_PENALTY = 0.05  # per doubling: attention over a longer row costs more per token
SIZE_STEP = 4  # micro-batches have 1, 4, 16, ... rows per data shard


@dataclass(frozen=True)
class Grid:
    """The few shapes that micro-batches come in; each is compiled once."""

    data_shards: int
    train_tokens: int  # most tokens of a micro-batch, per data shard
    max_context: int  # tokens

    @cached_property
    def row_lengths(self) -> tuple[int, ...]:
        lengths = [SHORTEST_ROW]
        while lengths[-1] < self.max_context:
            lengths.append(2 * lengths[-1])
        return tuple(lengths)

    @property
    def layout(self) -> str:
        """All that the shapes follow from, besides the requests."""
        return f"{self.data_shards}x{self.train_tokens}x{self.max_context}"

    def as_recorded(self, layout: str | None) -> "Grid":
        """The grid with this layout; rows cannot be split over another number of data shards, though."""
        recorded = Grid(*map(int, layout.split("x"))) if layout else self
        return recorded if recorded.data_shards == self.data_shards else self

    def sizes(self, row_length: int) -> list[int]:
        """How many rows a micro-batch of this row length may have, ascending; at least one per data shard."""
        sizes = [self.data_shards]
        while SIZE_STEP * sizes[-1] * row_length <= self.train_tokens * self.data_shards:
            sizes.append(SIZE_STEP * sizes[-1])
        return sizes


@dataclass(frozen=True)
class Layout:
    """Where each segment lies, and how the rows split into chunks."""

    row_length: int
    rows: np.ndarray  # [segments] row of each segment
    starts: np.ndarray  # [segments] place of its first token in the row
    chunks: list[tuple[int, int]]  # (rows in use, rows of the micro-batch); in order of the rows


def lay_out(lengths: np.ndarray, grid: Grid) -> Layout:
    """Choose the row length with the least padding, and place segments of these lengths (tokens)."""
    longest, total = int(lengths.max()), int(lengths.sum())
    best: Layout | None = None
    best_cost = float("inf")
    for doublings, row_length in enumerate(grid.row_lengths):
        penalty = 1 + LONGER_ROW_PENALTY * doublings
        if row_length < longest or best_cost <= total * penalty:
            continue  # too short, or no better even without any padding
        rows, starts = _first_fit_decreasing(lengths, row_length)
        chunks = split_rows(int(rows.max()) + 1, grid.sizes(row_length))
        cost = sum(size for _, size in chunks) * row_length * penalty
        if cost < best_cost:
            best, best_cost = Layout(row_length, rows, starts, chunks), cost
    assert best is not None, f"a segment of {longest} tokens is longer than the longest row"
    return best


def split_rows(count: int, sizes: list[int]) -> list[tuple[int, int]]:
    """Split rows into chunks (rows in use, size), large ones first, at least half full if they can be."""
    chunks = []
    while count:
        size = next((size for size in sizes if size >= count), sizes[-1])
        if 2 * count < size:
            size = next((size for size in reversed(sizes) if size <= count), size)
        used = min(count, size)
        chunks.append((used, size))
        count -= used
    return chunks


def _first_fit_decreasing(lengths: np.ndarray, row_length: int) -> tuple[np.ndarray, np.ndarray]:
    rows = np.zeros(len(lengths), np.int64)
    starts = np.zeros(len(lengths), np.int64)
    free = np.full(len(lengths), row_length)
    places = np.full(len(lengths), SEGMENTS_PER_ROW)
    opened = 0
    for segment in np.argsort(-lengths, kind="stable").tolist():
        length = lengths[segment]
        row = int(((free[: opened + 1] >= length) & (places[: opened + 1] > 0)).argmax())
        rows[segment] = row
        starts[segment] = row_length - free[row]
        free[row] -= length
        places[row] -= 1
        opened = max(opened, row + 1)
    return rows, starts
