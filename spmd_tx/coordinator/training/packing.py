"""Packs segments into rows (first-fit decreasing), and rows into blocks of few sizes. Pure.

A block is what a program runs on; a command carries several. Everything follows from one request alone, so
that its gradient does not depend on other requests.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from spmd_tx.coordinator.training.attention_cost import AttentionCost
from spmd_tx.protocol.commands import SEGMENTS_PER_ROW
from spmd_tx.protocol.setup import longest_row

SMALL_ROW = 16  # tokens: for experiments with a few words; only one row per data shard
USUAL_ROW = 64  # tokens: the shortest rows of which a block has several
FINE_UP_TO = 512  # tokens: two lengths per power of two up to here; longer rows hold many segments anyway
SMALL_ROWS = 2  # most rows of a small block, per data shard
FREE_ROW_SHARE = 0.25  # of a row's cost, for a row that is left to other models
LEAST_STEP = 4  # a larger block has at least this many times the rows of the smaller one
# A block's overhead: that of a small block's tokens divided by this where small ones are as good as any, on
# CPUs; where blocks come in three sizes, that of a large block's tokens divided by this.
OVERHEAD_SHARE, LARGE_OVERHEAD_SHARE = 8, 32


def row_lengths(max_context: int) -> tuple[int, ...]:
    """Return 16, 64, 96, 128, 192, ... 512, 1024, 2048, ...; the last just holds ``max_context`` tokens."""
    lengths, power = [SMALL_ROW, USUAL_ROW], USUAL_ROW
    while lengths[-1] < max_context:
        if lengths[-1] == power < FINE_UP_TO:
            lengths.append(3 * power // 2)
        else:
            power *= 2
            lengths.append(power)
    lengths[-1] = min(lengths[-1], longest_row(max_context))
    return tuple(lengths)


WITH_KERNELS = " with kernels "  # in a layout
OF_IMAGES = " with images of "  # in a layout
FITTED = "+"  # behind the context in a layout: its longest rows just hold it, and were chosen like others


@dataclass(frozen=True)
class TrainingShapes:
    """Defines the few shapes of blocks; each is compiled once."""

    data_shards: int
    train_tokens: int  # most tokens of a command, per data shard; one block may have more
    block_tokens: tuple[int, ...]  # of blocks, the smallest first, per data shard; one row may have more
    max_context: int  # tokens
    attention: AttentionCost
    expert_shards: int = 1  # data shards that each have a part of the experts, and rows of each other
    kernels: str = ""  # as Ready has it (protocol/reports.py)
    spares_longest: bool = False  # whether the longest rows are only for what no other row holds
    image_tokens: int = 0  # of the images of a chunk, each counted once; 0: any number finds room

    @property
    def is_fitted(self) -> bool:
        """Whether the longest row is no power of two; earlier versions had none but those."""
        return self.row_lengths[-1].bit_count() > 1 and self.row_lengths[-1] > FINE_UP_TO

    @cached_property
    def row_lengths(self) -> tuple[int, ...]:
        return row_lengths(self.max_context)

    @property
    def layout(self) -> str:
        """Everything besides the requests that determines blocks and kernels, for the log."""
        blocks = "+".join(map(str, self.block_tokens))
        context = f"{self.max_context}{FITTED if self.is_fitted and not self.spares_longest else ''}"
        cut = f"{self.data_shards}x{context}x{self.attention} in blocks of {blocks}"
        cut += f"{OF_IMAGES}{self.image_tokens}" if self.image_tokens else ""
        return f"{cut}{WITH_KERNELS}{self.kernels}" if self.kernels else cut

    def has_other_kernels(self, layout: str | None) -> bool:
        """Return whether a request was executed with other choices of kernels: its sums may differ then."""
        _, is_recorded, kernels = (layout or "").partition(WITH_KERNELS)
        return bool(is_recorded) and kernels != self.kernels

    def as_recorded(self, layout: str | None) -> "TrainingShapes":
        """Return the shapes with this layout, or these if it has other data shards or an old format.

        In that case a replayed request is cut like a new one, and its sums may differ in the last bits. So
        may those of rows that an earlier version made longer than they are now.
        """
        cut = (layout or "").partition(WITH_KERNELS)[0]
        given, is_ours, blocks = cut.partition(" in blocks of ")
        if not is_ours:
            return self
        shards, context, cost = given.split("x")
        blocks, _, images = blocks.partition(OF_IMAGES)
        recorded = replace(
            self,
            block_tokens=tuple(map(int, blocks.split("+"))),
            max_context=int(context.removesuffix(FITTED)),
            attention=AttentionCost.read(cost),
            image_tokens=int(images or 0),
        )
        recorded = replace(recorded, spares_longest=recorded.is_fitted and not context.endswith(FITTED))
        return recorded if int(shards) == self.data_shards else self

    def holding(self, tokens: int, room: int) -> "TrainingShapes":
        """Return shapes for a request with images of so many tokens, where devices have ``room`` for some."""
        return self if tokens <= room else replace(self, image_tokens=min(room, self.image_tokens or room))

    def blocks(self) -> list[tuple[int, int]]:
        """Return all shapes: (rows over all data shards, row length)."""
        return [(size, length) for length in self.row_lengths for size in self.sizes(length)]

    def sizes(self, row_length: int) -> list[int]:
        """Return the rows of a small block and, where they are worth a program, of larger ones."""
        if row_length == SMALL_ROW:
            return [self.data_shards]
        small, *larger = (tokens // row_length for tokens in self.block_tokens)
        sizes = [max(1, min(small, SMALL_ROWS))]
        for rows in larger:
            if rows >= LEAST_STEP * sizes[-1]:
                sizes.append(rows - rows % sizes[-1])
        return [self.data_shards * size for size in sizes]

    def most_blocks(self, size: int, row_length: int) -> int:
        """Return how many blocks of so many rows a command carries at most."""
        return max(1, self.train_tokens * self.data_shards // (size * row_length))

    @cached_property
    def choices(self) -> list[list[tuple[int, ...]]]:
        """Return for each number of data shards those among which rows give the same bits of gradients.

        Pairs are aligned, so that both of a pair compute the same experts or neither does. The last choices
        come first, because what takes more data shards has only the first ones.
        """
        shards = self.data_shards
        choices = [[tuple(range(count))] for count in range(shards + 1)]
        choices[1] = [(shard,) for shard in reversed(range(shards))]
        if shards > 1 and (self.expert_shards == 1 or self.expert_shards % 2 == 0):
            choices[2] = [(shard, shard + 1) for shard in reversed(range(0, shards - 1, 2))]
        return choices

    def token_cost(self, row_length: int) -> float:
        """Return the cost of a token in such a row, relative to one without attention."""
        return 1 + self.attention.of(row_length)

    @property
    def block_cost(self) -> int:
        """Overhead of a block, in tokens without attention."""
        if len(self.block_tokens) > 2:
            return self.data_shards * max(self.block_tokens) // LARGE_OVERHEAD_SHARE
        return self.data_shards * min(self.block_tokens) // OVERHEAD_SHARE

    def chunks(self, rows: int, row_length: int) -> list[tuple[int, int]]:
        """Split rows into chunks (rows, rows of a block), large blocks first; a command can carry each."""
        row_cost = row_length * self.token_cost(row_length)
        chunks: list[tuple[int, int]] = []
        for used, size in cheapest_blocks(rows, self.sizes(row_length), row_cost, self.block_cost):
            before, its_size = chunks[-1] if chunks else (0, 0)
            if size == its_size and before < size * self.most_blocks(size, row_length):
                chunks[-1] = (before + used, size)
            else:
                chunks.append((used, size))
        return chunks

    def least_cost(self, tokens: int, row_length: int) -> float:
        """Return a lower bound of the cost of ``tokens`` tokens: without padding of whole blocks."""
        tokens = max(tokens, row_length)
        return tokens * self.token_cost(row_length) + self.block_cost

    def cost(self, chunks: list[tuple[int, int]], row_length: int) -> float:
        """Return the cost of chunks, in tokens without attention."""
        rows, blocks = 0.0, 0
        for used, size in chunks:
            its_blocks = -(-used // size)
            blocks += its_blocks
            rows += used + FREE_ROW_SHARE * (its_blocks * size - used)
        return rows * row_length * self.token_cost(row_length) + self.block_cost * blocks


@dataclass(frozen=True)
class RowLayout:
    """Says where each segment lies, and how the rows split into chunks."""

    row_length: int
    rows: np.ndarray  # [segments] row of each segment
    starts: np.ndarray  # [segments] place of its first token in the row
    chunks: list[tuple[int, int]]  # (rows, rows of a block); in order of the rows


def lay_out(lengths: np.ndarray, shapes: TrainingShapes) -> RowLayout:
    """Choose the cheapest row length, and place segments of these lengths (tokens)."""
    longest, total = int(lengths.max()), int(lengths.sum())
    is_small = total <= shapes.data_shards * SMALL_ROW
    best: RowLayout | None = None
    best_cost = float("inf")
    row_lengths = shapes.row_lengths if is_small else shapes.row_lengths[1:]
    if shapes.spares_longest and longest <= row_lengths[-2]:
        row_lengths = row_lengths[:-1]
    for row_length in row_lengths:
        if row_length < longest or best_cost <= shapes.least_cost(total, row_length):
            continue  # too short, or no better even without any padding
        rows, starts = _first_fit_decreasing(lengths, row_length)
        chunks = shapes.chunks(int(rows.max()) + 1, row_length)
        cost = shapes.cost(chunks, row_length)
        if cost < best_cost:
            best, best_cost = RowLayout(row_length, rows, starts, chunks), cost
    assert best is not None, f"a segment of {longest} tokens is longer than the longest row"
    return best


def cheapest_blocks(
    count: int, sizes: list[int], row_cost: float, block_cost: float
) -> list[tuple[int, int]]:
    """Split rows into blocks (rows in use, size) at the least cost, free rows included.

    As many as possible have the largest size. All sizes are multiples of the smallest.
    """
    largest, unit = sizes[-1], sizes[0]
    chosen = [largest] * (count // largest)
    costs, firsts = [0.0], [0]  # by units of rows: the least cost, and one size that leads to it
    for units in range(1, -(-(count % largest) // unit) + 1):
        cost, first = min(
            (size * row_cost + block_cost + costs[max(0, units - size // unit)], size) for size in sizes
        )
        costs.append(cost)
        firsts.append(first)
    rest = len(costs) - 1
    while rest > 0:
        chosen.append(firsts[rest])
        rest -= firsts[rest] // unit
    blocks = []
    for size in sorted(chosen, reverse=True):
        blocks.append((min(count, size), size))
        count -= min(count, size)
    return blocks


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
