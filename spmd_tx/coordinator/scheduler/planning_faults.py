"""Finds the request for which no command can be planned, and fails it. Everybody else goes on.

An error in planning may be about any of the requests that were being planned together. They are lonely from
then on: planned again, each in commands of its own. One that cannot be planned alone is at fault. Samples
begin anew, since what was noted for them may be half done.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from spmd_tx.coordinator.requests.records import Failed, Outcome
from spmd_tx.coordinator.runtime.containment import let_pass, report
from spmd_tx.coordinator.scheduler.dispatcher import Dispatcher
from spmd_tx.coordinator.scheduler.planned_for import PlannedFor, isolate
from spmd_tx.coordinator.scheduler.request_table import RequestTable
from spmd_tx.coordinator.training.line import ModelLine
from spmd_tx.errors import NotPlanned


@dataclass(frozen=True)
class PlanningFaults:
    """Contains the errors of one dispatcher."""

    dispatcher: Dispatcher
    table: RequestTable
    lines: Mapping[str, ModelLine]  # by model
    resolve: Callable[[Iterable[tuple[str, Outcome]]], None]
    wake: Callable[[], None]

    def contain(self, work: Callable[[], None]) -> None:
        """Go on after an error, unless it is intended, or planning again would not tell whom it is about."""
        try:
            work()
        except BaseException as error:
            let_pass(error)
            planned_for = self.dispatcher.planned_for
            is_known = not isolate(planned_for, self.table)
            if is_known and len(planned_for) != 1:
                raise
            text = report(error, str(planned_for))
            if planned_for.samples:
                self.resolve(self.dispatcher.restart_sampling(planned_for.samples if is_known else ()))
            if is_known:
                self._give_up(planned_for, text)
            self.wake()  # the others have yet to be planned for

    def _give_up(self, guilty: PlannedFor, text: str) -> None:
        self.resolve((request_id, Failed(text, "server")) for request_id in guilty.samples)
        for model in guilty.models:
            model.give_up_next(NotPlanned(text))
            if model.refusal is not None:
                self.lines[model.id].refuse(model.refusal)
