"""The few shapes of sampling commands; each combination is compiled once. Pure.

All page tables have one width, since no more of a row's pages are read than it has. On CPUs a Prefill runs
row by row, so one program serves any number of rows.

With ``batch_invariant`` there is one program for all prompts and one for all Decodes, each for a block of a
fixed size: a command has any number of blocks. So what is computed for a token follows from its own request.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from spmd_tx.coordinator.sampling.cache.pages import pages_for
from spmd_tx.protocol.commands import CHUNK_STEPS, PREFILL_TOKENS, active_sizes

CHUNK_TOKENS = PREFILL_TOKENS  # most tokens of a Prefill on each data shard
SHORTEST_ROW = 64  # tokens of a prefill row
GROWTH = 4  # the factor between numbers of rows (1, 4, 16, ...) and between row lengths
FEW_ROWS = 16  # of a Decode: up to here it costs nearly as much as with one row
FEWEST_STEPS = 4  # of a Decode
BLOCK_ROWS = 16  # of a batch-invariant Decode on CPUs, at most; accelerators take all rows at once
BLOCK_TOKENS, CPU_BLOCK_TOKENS = 256, 64  # of a batch-invariant Prefill, at most


@dataclass(frozen=True)
class SamplingShapes:
    """Defines all shapes of a server's sampling commands, per data shard unless stated otherwise."""

    shards: int
    context: int  # most tokens of prompt and sample together
    page_size: int  # tokens
    decode_rows: int  # most rows of one Decode
    chunk_tokens: int = CHUNK_TOKENS
    on_cpu: bool = False
    batch_invariant: bool = False
    speculates: bool = False  # whether rows of a Decode may follow others
    has_states: bool = False  # that every token changes
    # Of making drafts, in steps that make none, where the model makes some itself; 0: it does not.
    draft_cost: float = 0.0
    # Tokens that a device computes while it reads the weights once; 0: Decodes read no chunks of prompts
    ridge: float = 0.0

    @cached_property
    def piece(self) -> int:
        """Tokens of a row that a Prefill's program takes at once, whole pages; 0: all.

        Cached beginnings of prompts end at multiples of it.
        """
        if not self.batch_invariant:
            return 0
        most = min(CPU_BLOCK_TOKENS if self.on_cpu else BLOCK_TOKENS, self.chunk_tokens)
        return self.page_size * max(1, most // self.page_size)

    @cached_property
    def chunk(self) -> int:
        """Most tokens of a Prefill; a whole number of pieces."""
        pieces = self.chunk_tokens // self.piece if self.piece else 0
        return max(1, pieces) * self.piece or self.chunk_tokens

    @cached_property
    def chunk_beside(self) -> int:
        """Tokens of a prompt's chunk that a Decode may read beside its rows; 0: none.

        A batch-invariant Decode has none: the company of its rows must not change its program.
        """
        is_possible = self.ridge and self.context > self.chunk and not self.chunk % CHUNK_STEPS
        return self.chunk if is_possible and not self.batch_invariant else 0

    @cached_property
    def decode_block(self) -> int:
        """Rows that a Decode's program takes at once; 0: all."""
        if not self.batch_invariant:
            return 0
        return min(BLOCK_ROWS, self.decode_rows) if self.on_cpu else self.decode_rows

    @property
    def decodes_speculate(self) -> bool:
        """Whether all Decodes, but for those of grammars, run the program of those that speculate.

        Another one may round otherwise what it adds to states.
        """
        return self.batch_invariant and (self.speculates or self.has_states)

    @cached_property
    def rows(self) -> int:
        """Samples that may be in one Decode: ``decode_rows``, or as many of them as are whole blocks."""
        return self.decode_rows - (self.decode_rows % self.decode_block if self.decode_block else 0)

    @cached_property
    def row_lengths(self) -> list[int]:
        """Lengths of prefill rows, in tokens; none longer than the context needs."""
        lengths = [min(self.piece or SHORTEST_ROW, self.chunk)]
        while lengths[-1] < min(self.chunk, self.context - 1):
            lengths.append(min(lengths[-1] * GROWTH, self.chunk))
        return lengths

    @cached_property
    def decode_sizes(self) -> list[int]:
        """Numbers of rows of a Decode, ascending. Above FEW_ROWS its cost grows with them."""
        if self.decode_block:
            return list(range(self.decode_block, self.rows + 1, self.decode_block))
        # From which on programs are a factor of two apart: a model expects but one token.
        fewest = (1 if self.draft_cost else GROWTH) if self.speculates else FEW_ROWS
        doubled = [2**n for n in range(self.decode_rows.bit_length()) if 2**n > fewest]
        return sorted({*_powers_of_four(min(FEW_ROWS, self.decode_rows)), *doubled, self.decode_rows})

    @cached_property
    def table(self) -> int:
        """The width of page tables, in pages."""
        return pages_for(self.context, self.page_size)

    def end_of_chunk(self, first: int, end: int) -> int:
        """Return where the chunk from ``first`` on ends, in a prompt that ends at ``end``.

        Cuts lie at multiples of the chunk size: they follow from the prompt, not from those beside it.
        """
        return min(end, (first // self.chunk + 1) * self.chunk)

    def row_length(self, tokens: int) -> int:
        return _smallest(self.row_lengths, tokens)

    @property
    def prefill_block(self) -> int:
        """The rows that a Prefill's program takes at once; 0: all."""
        return 1 if self.on_cpu or self.batch_invariant else 0

    def rows_of_prefill(self, used: int) -> int:
        """Return the rows of a Prefill with so many that hold anything."""
        return max(1, used) if self.prefill_block else power_of_four(used)

    def may_prefill(self, rows: int, row_length: int) -> bool:
        """Return whether a Prefill may have this shape."""
        return rows == 1 or rows * row_length <= self.chunk

    def prefills(self) -> list[tuple[int, int, int]]:
        """Return (rows of all data shards, row length, width of tables or 0) of every Prefill's program."""
        if self.piece:
            return [(self.shards, self.piece, self.table)]
        counts = [1] if self.on_cpu else _powers_of_four(self.chunk // self.row_lengths[0])
        return [
            (rows * self.shards, length, table)
            for length in self.row_lengths
            for table in (0, self.table)
            for rows in counts
            if self.may_prefill(rows, length)
        ]

    def decodes(self, bank_slots: int) -> list[tuple[int, int]]:
        """Return (rows of all data shards, active adapters) of every possible Decode."""
        return [
            (rows * self.shards, active)
            for rows in ([self.decode_block] if self.decode_block else self.decode_sizes)
            for active in self.active_sizes(rows * self.shards, bank_slots)
        ]

    def active_sizes(self, rows: int, bank_slots: int) -> list[int]:
        """Return the numbers of adapters for which a Decode of so many rows is compiled, ascending."""
        if self.batch_invariant:
            return [bank_slots]
        if not self.on_cpu:
            return active_sizes(rows, bank_slots)
        return [1, bank_slots] if rows > 1 else [1]  # adapters without rows cost nothing

    def rows_of_decode(self, samples: int) -> int:
        return _smallest(self.decode_sizes, samples)


@dataclass(frozen=True)
class SamplingLimits:
    """Says what the device has room for."""

    shapes: SamplingShapes
    pages_per_shard: int  # page 0 included
    decode_steps: int  # most steps of one Decode
    state_slots: int = 0  # per shard; 0: the model keeps no state of a sequence


def power_of_four(count: int) -> int:
    """Return the smallest of 1, 4, 16, ... that is at least ``count``."""
    size = 1
    while size < count:
        size *= GROWTH
    return size


def decode_steps(least_remaining: int, most: int, is_hurried: bool) -> int:
    """Return how many tokens a Decode draws per row.

    The row with the fewest tokens left decides, so that it is answered, and its row free, as soon as it is
    done; longer rows continue in the next Decode, which is sent before this one's reply is read. Each Decode
    has a fixed cost, so it takes at least a few steps. It takes no more when ``is_hurried``: when prompts
    could start at once or are likely to come.
    """
    fewest = min(FEWEST_STEPS, most)
    return fewest if is_hurried else max(fewest, min(least_remaining, most))


def _smallest(sizes: Sequence[int], count: int) -> int:
    return next(size for size in sizes if size >= count)


def _powers_of_four(most: int) -> list[int]:
    return [GROWTH**n for n in range(most.bit_length()) if GROWTH**n <= most]
