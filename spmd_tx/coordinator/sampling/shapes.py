"""The few sizes that sampling commands come in; each combination is compiled once. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from spmd_tx.coordinator.sampling.pages import pages_for
from spmd_tx.protocol.commands import PREFILL_TOKENS, active_sizes

CHUNK_TOKENS = PREFILL_TOKENS  # the most of a Prefill on each data shard
SHORTEST_ROW = 64  # tokens of a prefill row
NARROWEST_TABLE = 128  # tokens: what the pages of a decode row hold,
NARROWEST_CONTINUED_TABLE = 512  # and those of a prefill row that goes on behind what is there
MOST_SEEN = 8  # chunks: what all tables of a Prefill hold, unless it has one row only
GROWTH = 4  # rows come in 1, 4, 16, ..., and so do their lengths
FEW_ROWS = 16  # of a Decode
FEWEST_STEPS = 4  # of a Decode


@dataclass(frozen=True)
class SamplingShapes:
    """All sizes of a server's sampling commands, per data shard unless it says otherwise."""

    shards: int
    context: int  # tokens: the most of prompt and sample together
    page_size: int  # tokens
    decode_rows: int  # most of one Decode
    chunk_tokens: int = CHUNK_TOKENS

    @cached_property
    def row_lengths(self) -> list[int]:
        """Of prefill rows, in tokens; none longer than the context needs."""
        lengths = [min(SHORTEST_ROW, self.chunk_tokens)]
        while lengths[-1] < min(self.chunk_tokens, self.context - 1):
            lengths.append(min(lengths[-1] * GROWTH, self.chunk_tokens))
        return lengths

    @cached_property
    def decode_sizes(self) -> list[int]:
        """Rows of a Decode: few cost nearly what one does; above FEW_ROWS twice as many cost double."""
        doubled = [2**n for n in range(self.decode_rows.bit_length()) if 2**n > FEW_ROWS]
        return sorted({*_powers_of_four(min(FEW_ROWS, self.decode_rows)), *doubled, self.decode_rows})

    @cached_property
    def tables(self) -> list[int]:
        """Widths in pages: one for the whole context, and narrower ones, each with a quarter of the next."""
        widths = [pages_for(self.context, self.page_size)]
        while widths[0] * self.page_size >= GROWTH * NARROWEST_TABLE:
            widths.insert(0, pages_for(widths[0], GROWTH))
        return widths

    def end_of_chunk(self, first: int, end: int) -> int:
        """How far a prompt, which ends here, is read at once from a position on: to a multiple of chunks.

        Where a prompt is cut follows from the prompt, not from those beside it.
        """
        return min(end, (first // self.chunk_tokens + 1) * self.chunk_tokens)

    def row_length(self, tokens: int) -> int:
        return _smallest(self.row_lengths, tokens)

    def decode_table(self, pages: int) -> int:
        return _smallest(self.tables, pages)

    def prefill_table(self, pages: int, row_length: int) -> int:
        """The width of the tables of rows that go on."""
        least = pages_for(max(NARROWEST_CONTINUED_TABLE, row_length), self.page_size)
        return _smallest(self.tables, min(max(pages, least), self.tables[-1]))

    def may_prefill(self, rows: int, row_length: int, table: int) -> bool:
        """Whether a Prefill may have so many rows; ``table`` is 0 where rows do not go on."""
        is_short = rows * row_length <= self.chunk_tokens
        return rows == 1 or (is_short and rows * table * self.page_size <= MOST_SEEN * self.chunk_tokens)

    def prefills(self) -> list[tuple[int, int, int]]:
        """(rows of all data shards, their length, width of their tables or 0) of every possible Prefill."""
        return [
            (rows * self.shards, length, table)
            for length in self.row_lengths
            for table in [0, *sorted({self.prefill_table(pages, length) for pages in self.tables})]
            for rows in _powers_of_four(self.chunk_tokens // self.row_lengths[0])
            if self.may_prefill(rows, length, table)
        ]

    def decodes(self, bank_slots: int) -> list[tuple[int, int, int]]:
        """(rows of all data shards, width of their tables, adapters at once) of every possible Decode."""
        return [
            (rows * self.shards, table, active)
            for rows in self.decode_sizes
            for table in self.tables
            for active in active_sizes(rows * self.shards, bank_slots)
        ]

    def rows_of_decode(self, samples: int) -> int:
        return _smallest(self.decode_sizes, samples)


def power_of_two(least: int, count: int) -> int:
    """The smallest power of two, from ``least`` on, that holds so many."""
    size = least
    while size < count:
        size *= 2
    return size


def power_of_four(count: int) -> int:
    """The smallest of 1, 4, 16, ... that holds so many."""
    size = 1
    while size < count:
        size *= GROWTH
    return size


def decode_steps(least_remaining: int, most: int, is_hurried: bool) -> int:
    """How many tokens a Decode draws per row.

    The row with the fewest tokens left decides, so that it is answered as soon as it is done, and its
    place is free again; longer rows simply go on in the next Decode, which is sent before this one's
    reply is read. A few steps are always taken, because each Decode has a price of its own. Prompts that
    could start at once, or are likely to come, hurry: they wait for these few steps only.
    """
    fewest = min(FEWEST_STEPS, most)
    return fewest if is_hurried else max(fewest, min(least_remaining, most))


def _smallest(sizes: Sequence[int], count: int) -> int:
    """The smallest that holds so many."""
    return next(size for size in sizes if size >= count)


def _powers_of_four(most: int) -> list[int]:
    sizes = [1]
    while sizes[-1] * GROWTH <= most:
        sizes.append(sizes[-1] * GROWTH)
    return sizes
