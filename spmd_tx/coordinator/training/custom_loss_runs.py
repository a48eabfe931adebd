"""Runs of custom losses in progress; workers run them beside the commands."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from spmd_tx.bounds import Bounds
from spmd_tx.coordinator.runtime.futures import fail
from spmd_tx.coordinator.training.model import TrainedModel
from spmd_tx.custom_loss.limits import LossLimits
from spmd_tx.errors import ForeignCodeFailed, InvalidRequest, LossGivenUp, MeshError
from spmd_tx.protocol.commands import CustomLoss
from spmd_tx.protocol.reports import CustomLossEnd, CustomLossNews

LossArrays = dict[str, np.ndarray]


class _Run(NamedTuple):
    model: TrainedModel
    ended: asyncio.Future[CustomLossEnd]


@dataclass
class LossRuns:
    """Tracks the runs of custom losses on the workers."""

    limits: LossLimits
    _runs: dict[int, _Run] = field(default_factory=dict)
    _count: int = 0

    async def run(self, model: TrainedModel, make: Callable[[int], CustomLoss]) -> LossArrays:
        """Send the command that is made for a run's number; return what the workers report.

        Raises InvalidRequest when the loss cannot be run, LossGivenUp when it should not be tried again, and
        ForeignCodeFailed when the fault is the server's.
        """
        number = self._count
        self._count += 1
        run = self._runs[number] = _Run(model, asyncio.get_running_loop().create_future())
        try:
            await model.put(make(number))
            end = await run.ended
        finally:
            del self._runs[number]
            model.errand = None
        if end.problem is None:
            return end.arrays
        if end.is_ours:
            raise ForeignCodeFailed(end.problem)
        raise (LossGivenUp if end.is_given_up else InvalidRequest)(end.problem)

    def take(self, report: CustomLossNews | CustomLossEnd) -> None:
        """Take a report from the workers; one about a run that has ended is ignored."""
        run = self._runs.get(report.number)
        if run is None:
            return
        if isinstance(report, CustomLossNews):
            run.model.errand = report.doing
        elif not run.ended.done():
            run.ended.set_result(report)

    def abandon(self, error: MeshError) -> None:
        """Fail all runs: the workers are lost."""
        for run in self._runs.values():
            fail(run.ended, error)


def loss_limits(bounds: Bounds) -> LossLimits:
    return LossLimits(
        operations_per_datum=bounds.custom_loss_datum_operations,
        operations=bounds.custom_loss_operations,
        programs=bounds.custom_loss_programs,
        compile_seconds=bounds.custom_loss_compile_seconds,
        run_seconds=bounds.custom_loss_run_seconds,
    )
