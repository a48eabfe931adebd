"""All programs that requests of any size can need, in the order in which they are likely to. Pure.

Not among them are those of rare kinds of requests: losses of whole sequences, several targets per position,
scores of prompts besides log-probabilities, and custom losses. They are compiled when they are wanted.
"""

from dataclasses import dataclass

from spmd_tx.coordinator.buckets import GROWTH, NARROWEST_TABLE, SHORTEST_ROW, power_of_four, power_of_two
from spmd_tx.coordinator.packing import Grid
from spmd_tx.coordinator.pages import pages_for
from spmd_tx.coordinator.prefill import NARROWEST_CONTINUED_TABLE
from spmd_tx.protocol import ProgramShape, active_sizes

# Steps of single adapters, which have one program each.
FIRST = "create_adapter", "save_sampler", "optim_step"
LAST = "save_state", "load_state", "page_out"

COMMON_TOKENS = 1024  # of a row: longer ones come last


@dataclass(frozen=True)
class SamplingSizes:
    """What the shapes of sampling commands follow from."""

    shards: int
    rows: int  # most of one Decode, per data shard
    page_size: int  # tokens
    prefill_tokens: int  # most of one Prefill, per data shard
    max_context: int  # tokens
    bank_slots: int


def program_menu(grid: Grid, sizes: SamplingSizes) -> list[ProgramShape]:
    """Every program once; the first few are enough to begin with."""
    shapes = [*training_shapes(grid), *prefill_shapes(sizes), *decode_shapes(sizes)]
    return [
        *(ProgramShape(step=step) for step in FIRST),
        *sorted(shapes, key=_rank),
        *(ProgramShape(step=step) for step in LAST),
    ]


def training_shapes(grid: Grid) -> list[ProgramShape]:
    return [
        ProgramShape(step=step, rows=rows, row_length=row_length)
        for row_length in grid.row_lengths
        for rows in grid.sizes(row_length)
        for step in ("forward_backward", "forward")
    ]


def prefill_shapes(sizes: SamplingSizes) -> list[ProgramShape]:
    shapes = []
    for table in (0, *_continued_tables(sizes)):
        reach = sizes.page_size * table or sizes.max_context  # tokens that a row can be about
        for row_length in _row_lengths(min(reach, sizes.max_context)):
            for rows in _row_counts(sizes.prefill_tokens // max(row_length, sizes.page_size * table)):
                shapes += [
                    ProgramShape(
                        step="prefill",
                        rows=rows * sizes.shards,
                        row_length=row_length,
                        logprobs=logprobs,
                        table=table,
                    )
                    for logprobs in (False, True)
                ]
    return shapes


def decode_shapes(sizes: SamplingSizes) -> list[ProgramShape]:
    widest = power_of_two(NARROWEST_TABLE, pages_for(sizes.max_context, sizes.page_size))
    tables = [NARROWEST_TABLE]
    while tables[-1] < widest:
        tables.append(2 * tables[-1])
    counts = {min(power_of_four(rows), sizes.rows) * sizes.shards for rows in range(1, sizes.rows + 1)}
    return [
        ProgramShape(step="decode", rows=rows, table=table, active=active)
        for rows in sorted(counts)
        for active in active_sizes(rows, sizes.bank_slots)
        for table in tables
    ]


def _row_lengths(longest: int) -> list[int]:
    lengths = [SHORTEST_ROW]
    while lengths[-1] < longest:
        lengths.append(2 * lengths[-1])
    return lengths


def _row_counts(most: int) -> list[int]:
    counts = [1]
    while GROWTH * counts[-1] <= most:
        counts.append(GROWTH * counts[-1])
    return counts


def _continued_tables(sizes: SamplingSizes) -> list[int]:
    tables = [NARROWEST_CONTINUED_TABLE]
    while tables[-1] * sizes.page_size < sizes.max_context:
        tables.append(GROWTH * tables[-1])
    return tables


def _rank(shape: ProgramShape) -> tuple[int, int, int, int]:
    """Small commands first, then common ones, and what is long or rare at the end."""
    stages = {"prefill": 0, "decode": 0, "forward": 0, "forward_backward": 0}
    tokens = max(shape.row_length, 16 * shape.table)
    is_small = shape.rows == 1 and tokens <= 256
    is_rare = tokens > COMMON_TOKENS or shape.logprobs or (shape.step == "prefill" and shape.table > 0)
    stage = stages[shape.step] if is_small and not is_rare else 2 if is_rare else 1
    return stage, tokens, -shape.rows, shape.active
