"""Packs segments into rows (first-fit decreasing), and rows into micro-batches of few sizes. Pure.

Everything follows from one request alone, so that its gradient does not depend on other requests.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spmd_tx.models.config import ModelConfig
from spmd_tx.protocol.commands import SEGMENTS_PER_ROW

SMALL_ROW = 16  # tokens: for experiments with a few words; only one row per data shard
USUAL_ROW = 64  # tokens: the shortest rows of micro-batches with several sizes
FINE_UP_TO = 512  # tokens: two lengths per power of two up to here; longer rows hold many segments anyway
SIZE_STEP = 8  # micro-batches have 1, 8, 64, ... rows per data shard
LARGEST_STEP = 4  # the largest allowed size is added if it is at least this many times the last one
MICRO_BATCH_TOKENS = 128  # overhead of a micro-batch, in tokens


def attention_share(model: ModelConfig) -> float:
    """Return the training cost of a token's attention per token of its row, relative to its weight products.

    Attention covers a whole row, whatever segments it holds: two products with half of the scores in the
    forward pass and five in the backward pass, while the frozen weights take one in each.
    """
    heads, kv_heads = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    feed_forward = 3 * model.d_model * model.d_ff * max(1, model.n_experts)
    layer = model.d_model * 2 * (heads + kv_heads) + feed_forward
    weights = model.n_layers * layer + model.d_model * model.vocab_size
    return float(f"{7 * heads * model.n_layers / (4 * weights):.3g}")


def row_lengths(max_context: int) -> tuple[int, ...]:
    """Return 16, 64, 96, 128, 192, ... 512, 1024, 2048, ...; the last one holds ``max_context`` tokens."""
    lengths, power = [SMALL_ROW, USUAL_ROW], USUAL_ROW
    while lengths[-1] < max_context:
        if lengths[-1] == power < FINE_UP_TO:
            lengths.append(3 * power // 2)
        else:
            power *= 2
            lengths.append(power)
    return tuple(lengths)


@dataclass(frozen=True)
class TrainingShapes:
    """Defines the few shapes of micro-batches; each is compiled once."""

    data_shards: int
    train_tokens: int  # most tokens of a micro-batch, per data shard
    max_context: int  # tokens
    attention_share: float  # as ``attention_share`` returns it

    @cached_property
    def row_lengths(self) -> tuple[int, ...]:
        return row_lengths(self.max_context)

    @property
    def layout(self) -> str:
        """Everything besides the requests that determines the shapes, for the log."""
        return f"{self.data_shards}x{self.train_tokens}x{self.max_context}x{self.attention_share}"

    def as_recorded(self, layout: str | None) -> "TrainingShapes":
        """Return the shapes with this layout, or these if it has other data shards or an old format.

        In that case a replayed request is cut like a new one, and its sums may differ in the last bits.
        """
        if not layout or layout.count("x") != 3:
            return self
        shards, tokens, context, share = layout.split("x")
        recorded = TrainingShapes(int(shards), int(tokens), int(context), float(share))
        return recorded if recorded.data_shards == self.data_shards else self

    def micro_batches(self) -> list[tuple[int, int]]:
        """Return all shapes: (rows over all data shards, row length)."""
        return [(size, length) for length in self.row_lengths for size in self.sizes(length)]

    def sizes(self, row_length: int) -> list[int]:
        """Return the numbers of rows for this row length, ascending; at least one per data shard."""
        if row_length == SMALL_ROW:
            return [self.data_shards]
        most = max(1, self.train_tokens // row_length)  # per data shard
        sizes = [1]
        while SIZE_STEP * sizes[-1] <= most:
            sizes.append(SIZE_STEP * sizes[-1])
        if most >= LARGEST_STEP * sizes[-1]:
            sizes.append(1 << (most.bit_length() - 1))
        return [self.data_shards * size for size in sizes]

    def token_cost(self, row_length: int) -> float:
        """Return the cost of a token in such a row, relative to one without attention."""
        return 1 + self.attention_share * row_length

    @property
    def micro_batch_cost(self) -> int:
        """Overhead of a micro-batch, in tokens without attention."""
        return MICRO_BATCH_TOKENS * self.data_shards

    def chunks(self, rows: int, row_length: int) -> list[tuple[int, int]]:
        """Split rows into chunks (rows in use, rows of the micro-batch), large ones first."""
        row_cost = row_length * self.token_cost(row_length)
        return cheapest_chunks(rows, self.sizes(row_length), row_cost, self.micro_batch_cost)

    def least_cost(self, tokens: int, row_length: int) -> float:
        """Return a lower bound of the cost of ``tokens`` tokens: without padding of full micro-batches."""
        tokens = max(tokens, self.data_shards * row_length)
        return tokens * self.token_cost(row_length) + self.micro_batch_cost

    def cost(self, chunks: list[tuple[int, int]], row_length: int) -> float:
        """Return the cost of chunks, in tokens without attention."""
        tokens = sum(size for _, size in chunks) * row_length
        return tokens * self.token_cost(row_length) + self.micro_batch_cost * len(chunks)


@dataclass(frozen=True)
class Layout:
    """Says where each segment lies, and how the rows split into chunks."""

    row_length: int
    rows: np.ndarray  # [segments] row of each segment
    starts: np.ndarray  # [segments] place of its first token in the row
    chunks: list[tuple[int, int]]  # (rows in use, rows of the micro-batch); in order of the rows


def lay_out(lengths: np.ndarray, shapes: TrainingShapes) -> Layout:
    """Choose the cheapest row length, and place segments of these lengths (tokens)."""
    longest, total = int(lengths.max()), int(lengths.sum())
    is_small = total <= shapes.data_shards * SMALL_ROW
    best: Layout | None = None
    best_cost = float("inf")
    for row_length in shapes.row_lengths if is_small else shapes.row_lengths[1:]:
        if row_length < longest or best_cost <= shapes.least_cost(total, row_length):
            continue  # too short, or no better even without any padding
        rows, starts = _first_fit_decreasing(lengths, row_length)
        chunks = shapes.chunks(int(rows.max()) + 1, row_length)
        cost = shapes.cost(chunks, row_length)
        if cost < best_cost:
            best, best_cost = Layout(row_length, rows, starts, chunks), cost
    assert best is not None, f"a segment of {longest} tokens is longer than the longest row"
    return best


def cheapest_chunks(
    count: int, sizes: list[int], row_cost: float, chunk_cost: float
) -> list[tuple[int, int]]:
    """Split rows into chunks (rows in use, size) at the least cost, free rows included.

    As many as possible have the largest size. All sizes are multiples of the smallest.
    """
    largest, unit = sizes[-1], sizes[0]
    chosen = [largest] * (count // largest)
    costs, firsts = [0.0], [0]  # by units of rows: the least cost, and one size that leads to it
    for units in range(1, -(-(count % largest) // unit) + 1):
        cost, first = min(
            (size * row_cost + chunk_cost + costs[max(0, units - size // unit)], size) for size in sizes
        )
        costs.append(cost)
        firsts.append(first)
    rest = len(costs) - 1
    while rest > 0:
        chosen.append(firsts[rest])
        rest -= firsts[rest] // unit
    chunks = []
    for size in sorted(chosen, reverse=True):
        chunks.append((min(count, size), size))
        count -= min(count, size)
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
