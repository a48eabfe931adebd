"""Compiles the largest batch of each step before anything is allocated, and reads its memory from XLA."""

from collections.abc import Callable

from jax.sharding import Mesh

from spmd_tx.worker.memory.plan import Plan, UsableMemory
from spmd_tx.worker.memory.refusal import make_plan
from spmd_tx.worker.memory.sizes import Sizes
from spmd_tx.worker.memory.steps import BatchShape, StepName
from spmd_tx.worker.programs.examples import menu_of

Measure = Callable[[Plan, StepName, BatchShape], int]


def measured_plan(
    sizes: Sizes,
    memory: UsableMemory,
    progress: Callable[[str], None],
    agreed: Callable[[float], float],
    measure: Measure,
) -> Plan:
    """Make a plan with measured steps; each kind of step is measured once.

    ``agreed`` turns the numbers that the processes have measured into one.
    """
    corrections: dict[StepName, float] = {}
    while True:
        plan = make_plan(sizes, memory, corrections)
        unknown = {step: worst for step, worst in plan.worst().items() if step not in corrections}
        if not unknown:
            return plan
        for step, (shape, estimate) in unknown.items():
            progress(f"measuring {step} of {shape.rows} x {shape.length}")
            corrections[step] = agreed(measure(plan, step, shape) / estimate)


def measure(plan: Plan, step: StepName, shape: BatchShape) -> int:
    """Return the bytes of a device that the step needs for this shape, besides its arguments.

    ``shape`` is per data shard; for decode its length is what a row's pages hold, in tokens.
    """
    mesh = plan.sizes.mesh
    assert isinstance(mesh, Mesh), "programs are compiled for devices"
    call = menu_of(plan, mesh).calls(plan.program(step, shape))[0]
    lowered = call.step.lower(*call.abstract(mesh))
    return lowered.compile().memory_analysis().temp_size_in_bytes
