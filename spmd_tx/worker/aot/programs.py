"""The programs of a memory plan that are worth looking at: usual ones for speed, the largest for memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from spmd_tx.models.declared.tower import MERGED
from spmd_tx.protocol.commands import PREFILL_TOKENS, active_sizes
from spmd_tx.protocol.places import MOVE_STEPS, MOVE_STEPS_OF_SAMPLING
from spmd_tx.protocol.programs import ProgramShape
from spmd_tx.worker.memory.plan import Plan
from spmd_tx.worker.memory.sizes import BatchShape

COMMON_PATCHES = 1024, 4096  # of images of up to 512 and 1,024 pixels a side
AHEAD_ROWS = 16  # of a data shard, the most that speculate
WantedKind = Literal["train", "forward", "prefill", "decode", "encode", "optim_step", "other"]


@dataclass(frozen=True)
class WantedProgram:
    """Describes a command whose programs are to be compiled."""

    name: str
    kind: WantedKind
    shape: ProgramShape
    planned: int | None = None  # bytes that the plan has for it while it runs; None: it has no figure
    tokens: int = 0  # of all devices, that one run computes
    is_usual: bool = False  # whether predictions are made from it


def wanted(plan: Plan) -> Iterator[WantedProgram]:
    """Yield the commands."""
    trains = plan.sizes.setup.trains
    if trains:
        yield from _training(plan)
    yield from _prefills(plan)
    yield from _decodes(plan)
    yield from _images(plan)
    if trains:
        yield WantedProgram("optim_step", "optim_step", ProgramShape(step="optim_step"), is_usual=True)
    for step in MOVE_STEPS if trains else MOVE_STEPS_OF_SAMPLING:
        yield WantedProgram(step, "other", ProgramShape(step=step))


def _training(plan: Plan) -> Iterator[WantedProgram]:
    usual = plan.usual_shape
    worst = [shape for step, (shape, _) in plan.worst().items() if step.startswith("train ")]
    shortest = plan.train_shapes[0]  # whose many rows may each have their own adapter
    for shape in dict.fromkeys((usual, shortest, *worst)):
        level = plan.level(*shape)
        yield WantedProgram(
            f"train {level} {shape.rows}x{shape.length}",
            "train",
            _of_rows(plan, "forward_backward", shape),
            planned=plan.steps.train(level, shape),
            tokens=shape.tokens * plan.sizes.data_shards,
            is_usual=shape == usual,
        )
    yield WantedProgram(
        f"forward {usual.rows}x{usual.length}",
        "forward",
        _of_rows(plan, "forward", usual),
        tokens=usual.tokens * plan.sizes.data_shards,
        is_usual=True,
    )


def _prefills(plan: Plan) -> Iterator[WantedProgram]:
    usual, worst = plan.sizes.usual_shape(PREFILL_TOKENS), plan.worst()["prefill"][0]
    for shape in dict.fromkeys((usual, worst)):
        yield WantedProgram(
            f"prefill {shape.rows}x{shape.length}",
            "prefill",
            _of_rows(plan, "prefill", shape),
            planned=plan.steps.prefill(shape, 0),
            tokens=shape.tokens * plan.sizes.data_shards,
            is_usual=shape == usual,
        )
    width = plan.sizes.widest_table
    last = BatchShape(1, usual.length)
    yield WantedProgram(
        f"continued prefill 1x{last.length} after {width}",
        "prefill",
        _of_rows(plan, "prefill", last, table=width // plan.sizes.setup.page_size),
        planned=plan.steps.prefill(last, width),
        tokens=last.tokens * plan.sizes.data_shards,
    )


def _decodes(plan: Plan) -> Iterator[WantedProgram]:
    setup, rows = plan.sizes.setup, plan.rows_of_decode
    counts = [setup.bank_slots] if setup.batch_invariant else active_sizes(rows, setup.bank_slots)
    copied = [count for count in counts if count < setup.bank_slots] or counts
    for active in dict.fromkeys((counts[0], copied[-1])):
        yield WantedProgram(
            f"decode {plan.decode_rows} of {active}",
            "decode",
            ProgramShape(step="decode", rows=rows, active=active),
            planned=plan.steps.decode(plan.decode_rows, plan.sizes.widest_table),
            tokens=rows,
            is_usual=active == counts[0],
        )
    if plan.sizes.model.mtp is not None and plan.decode_rows >= AHEAD_ROWS:
        yield WantedProgram(
            f"speculative decode {AHEAD_ROWS} of {counts[0]}",
            "decode",
            ProgramShape(
                step="decode", rows=AHEAD_ROWS * plan.sizes.data_shards, active=counts[0], speculative=True
            ),
            planned=plan.steps.decode(AHEAD_ROWS, plan.sizes.widest_table),
            tokens=AHEAD_ROWS * plan.sizes.data_shards,
        )


def _images(plan: Plan) -> Iterator[WantedProgram]:
    sizes = plan.sizes
    for patches in COMMON_PATCHES if sizes.sight is not None else ():
        if patches <= sizes.most_patches:
            shape = ProgramShape(step="encode_images", patches=patches)
            yield WantedProgram(
                f"encode {patches}",
                "encode",
                shape,
                planned=plan.steps.encode(patches),
                tokens=patches // MERGED * sizes.mesh.size,  # each device has an image
            )


def _of_rows(
    plan: Plan, step: Literal["forward", "forward_backward", "prefill"], shape: BatchShape, table: int = 0
) -> ProgramShape:
    """Return the program for a shape of each data shard."""
    rows = shape.rows * plan.sizes.data_shards
    return ProgramShape(step=step, rows=rows, row_length=shape.length, table=table)
