"""Corrects a plan by what the programs of its largest batches need, before anything is allocated."""

from collections.abc import Callable

from spmd_tx.worker.memory.plan import Plan, UsableMemory
from spmd_tx.worker.memory.refusal import make_plan
from spmd_tx.worker.memory.sizes import BatchShape, Sizes
from spmd_tx.worker.memory.steps import StepName

# The bytes of a device that a step of a plan needs for a shape, besides its arguments. The shape is per data
# shard; for decode its length is what a row's pages hold, in tokens.
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
