"""Lists the programs that requests of any size can need, the likeliest first. Pure.

Programs of rare kinds of requests are left out: losses of whole sequences, several targets per position,
scores of prompts besides log-probabilities, and custom losses. They are compiled when they are needed.
"""

from msgspec.structs import replace

from spmd_tx.coordinator.sampling.riders import saves_time
from spmd_tx.coordinator.sampling.shapes import FEW_ROWS, SamplingShapes
from spmd_tx.coordinator.training.packing import TrainingShapes
from spmd_tx.protocol.places import MOVE_STEPS, MOVE_STEPS_OF_SAMPLING, MoveStep
from spmd_tx.protocol.programs import ProgramShape

# Steps of single adapters, which have one program each.
FIRST = "create_adapter", "save_sampler", "optim_step"
LAST: tuple[MoveStep, ...] = tuple(step for step in MOVE_STEPS if step not in FIRST)
BEGINNING = "prefill", "decode", "load_sampler", *FIRST, "forward_backward", "forward"

TRAINING = "forward_backward", "forward"

SMALL_TOKENS, COMMON_TOKENS = 256, 1024  # of a row: what most first requests need, and most of all requests


def program_menu(
    shapes: TrainingShapes | None, sampling: SamplingShapes, bank_slots: int
) -> list[ProgramShape]:
    """List every program once; the first few are enough to begin with. Without ``shapes``, none trains."""
    steps = MOVE_STEPS_OF_SAMPLING if shapes is None else (*FIRST, *LAST)
    of_adapters = [ProgramShape(step=step) for step in steps]
    of_rows = [
        *([] if shapes is None else _training(shapes)),
        *_prefills(sampling),
        *_decodes(sampling, bank_slots),
    ]
    return sorted([*of_adapters, *of_rows], key=lambda shape: _rank(shape, sampling))


def _training(shapes: TrainingShapes) -> list[ProgramShape]:
    return [
        ProgramShape(step=step, rows=rows, row_length=row_length)
        for rows, row_length in shapes.blocks()
        for step in TRAINING
    ]


def _prefills(menu: SamplingShapes) -> list[ProgramShape]:
    return [
        ProgramShape(step="prefill", rows=rows, row_length=row_length, logprobs=logprobs, table=table)
        for rows, row_length, table in menu.prefills()
        for logprobs in ((True,) if menu.batch_invariant else (False, True))
    ]


def _decodes(menu: SamplingShapes, bank_slots: int) -> list[ProgramShape]:
    """List the decodes, and those of most rows that read a chunk, too: they serve for fewer rows as well.

    Where the model makes drafts, few sequences nearly always speculate.
    """
    alone = [
        ProgramShape(step="decode", rows=rows, active=active, speculative=menu.decodes_speculate)
        for rows, active in menu.decodes(bank_slots)
    ]
    most, few = menu.rows * menu.shards, range(menu.shards + 1, FEW_ROWS * menu.shards + 1)
    beside = [each for each in alone if each.rows == most and saves_time(menu, menu.rows)]
    ahead = [each for each in alone if each.rows in few and menu.draft_cost and not each.speculative]
    return [
        *alone,
        *(replace(each, chunk=menu.chunk_beside) for each in beside),
        *(replace(each, speculative=True) for each in ahead),
    ]


def _rank(shape: ProgramShape, menu: SamplingShapes) -> tuple[int, ...]:
    """First one row, or one per data shard, of few tokens; then common sizes, large batches before small
    ones; and at the end what is long or rare."""
    tokens = SMALL_TOKENS if shape.step == "decode" else shape.row_length
    if menu.batch_invariant and shape.step in ("prefill", "decode"):
        return 0, BEGINNING.index(shape.step), 0, 0, 0  # the only one
    is_rare = shape.logprobs or (shape.step == "prefill" and shape.table > 0) or shape.step in LAST
    is_rare = is_rare or shape.chunk > 0
    if tokens > COMMON_TOKENS or is_rare:
        stage = 2
    else:
        most = SMALL_TOKENS // max(1, tokens)  # rows per data shard: small blocks of short rows have several
        most = most if shape.step in TRAINING else min(1, most)
        stage = 0 if shape.rows <= menu.shards * most else 1
    order = BEGINNING.index(shape.step) if stage == 0 else 0
    return stage, order, tokens, -shape.rows, shape.active
