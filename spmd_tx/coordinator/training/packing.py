"""First-fit decreasing: segments into rows of one length, rows into micro-batches of few sizes. Pure.

Everything here follows from one request alone, so that its gradient does not depend on the company it is in.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spmd_tx.models.config import ModelConfig
from spmd_tx.protocol.commands import SEGMENTS_PER_ROW

SMALL_ROW = 16  # tokens: for what is tried out with a word or two; there is one per data shard, no more
USUAL_ROW = 64  # tokens: of the shortest rows that come in several sizes
FINE_UP_TO = 512  # tokens: shorter rows come in two lengths per power of two; longer ones hold many segments
SIZE_STEP = 8  # micro-batches have 1, 8, 64, ... rows per data shard
LARGEST_STEP = 4  # and as many as the budget allows, if those are so many times more
MICRO_BATCH_TOKENS = 128  # a micro-batch costs as much as so many tokens, besides its own


def attention_share(model: ModelConfig) -> float:
    """What a token's attention costs in training, per token of its row, beside its products with the weights.

    Rows are attended to as a whole, whatever segments they hold: forward two products with half of the
    scores and five on the way back, while the frozen weights take one each.
    """
    heads, kv_heads = model.n_heads * model.head_dim, model.n_kv_heads * model.head_dim
    feed_forward = 3 * model.d_model * model.d_ff * max(1, model.n_experts)
    layer = model.d_model * 2 * (heads + kv_heads) + feed_forward
    weights = model.n_layers * layer + model.d_model * model.vocab_size
    return float(f"{7 * heads * model.n_layers / (4 * weights):.3g}")


def row_lengths(max_context: int) -> tuple[int, ...]:
    """16, 64, 96, 128, 192, ... 512, 1024, 2048, ...; the longest holds a sequence of ``max_context``."""
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
    """The few shapes that micro-batches come in; each is compiled once."""

    data_shards: int
    train_tokens: int  # most tokens of a micro-batch, per data shard
    max_context: int  # tokens
    attention_share: float  # of ``attention_share``

    @cached_property
    def row_lengths(self) -> tuple[int, ...]:
        return row_lengths(self.max_context)

    @property
    def layout(self) -> str:
        """All that the shapes follow from, besides the requests."""
        return f"{self.data_shards}x{self.train_tokens}x{self.max_context}x{self.attention_share}"

    def as_recorded(self, layout: str | None) -> "TrainingShapes":
        """The shapes with this layout, unless it is of another number of data shards or an earlier version.

        Then requests are cut as new ones are: their sums may have other last bits.
        """
        if not layout or layout.count("x") != 3:
            return self
        shards, tokens, context, share = layout.split("x")
        recorded = TrainingShapes(int(shards), int(tokens), int(context), float(share))
        return recorded if recorded.data_shards == self.data_shards else self

    def micro_batches(self) -> list[tuple[int, int]]:
        """All shapes: rows over all data shards, and row length."""
        return [(size, length) for length in self.row_lengths for size in self.sizes(length)]

    def sizes(self, row_length: int) -> list[int]:
        """How many rows a micro-batch of this row length may have, ascending; at least one per data shard."""
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
        """What a token of such a row costs, beside one that attends to nothing."""
        return 1 + self.attention_share * row_length

    @property
    def micro_batch_cost(self) -> int:
        """What a micro-batch costs besides its tokens, in tokens that attend to nothing."""
        return MICRO_BATCH_TOKENS * self.data_shards

    def chunks(self, rows: int, row_length: int) -> list[tuple[int, int]]:
        """Split rows into chunks (rows in use, rows of the micro-batch), large ones first."""
        row_cost = row_length * self.token_cost(row_length)
        return cheapest_chunks(rows, self.sizes(row_length), row_cost, self.micro_batch_cost)

    def least_cost(self, tokens: int, row_length: int) -> float:
        """What so many tokens cost if there is no padding but that of the last micro-batch."""
        tokens = max(tokens, self.data_shards * row_length)
        return tokens * self.token_cost(row_length) + self.micro_batch_cost

    def cost(self, chunks: list[tuple[int, int]], row_length: int) -> float:
        """In tokens that attend to nothing."""
        tokens = sum(size for _, size in chunks) * row_length
        return tokens * self.token_cost(row_length) + self.micro_batch_cost * len(chunks)


@dataclass(frozen=True)
class Layout:
    """Where each segment lies, and how the rows split into chunks."""

    row_length: int
    rows: np.ndarray  # [segments] row of each segment
    starts: np.ndarray  # [segments] place of its first token in the row
    chunks: list[tuple[int, int]]  # (rows in use, rows of the micro-batch); in order of the rows


def lay_out(lengths: np.ndarray, shapes: TrainingShapes) -> Layout:
    """Choose the row length that costs least, and place segments of these lengths (tokens)."""
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
    """Split rows into chunks (rows in use, size), so that their rows, free ones too, cost least.

    As many as possible are of the largest size. All sizes are multiples of the smallest.
    """
    largest, unit = sizes[-1], sizes[0]
    chosen = [largest] * (count // largest)
    costs, firsts = [0.0], [0]  # of so many units of rows: the least cost, and one size that leads to it
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
