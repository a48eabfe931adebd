"""Finds the request for which no command can be planned, and fails it. Everybody else goes on.

An error in planning may be about any of the requests that were being planned together. They are lonely from
then on: planned again, each in commands of its own. One that cannot be planned alone is at fault.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from spmd_tx.coordinator.requests.records import Failed, Outcome
from spmd_tx.coordinator.runtime.containment import let_pass, report
from spmd_tx.coordinator.scheduler.dispatcher import Dispatcher
from spmd_tx.coordinator.scheduler.planned_for import PlannedFor
from spmd_tx.coordinator.training.line import ModelLine
from spmd_tx.errors import NotPlanned


@dataclass(frozen=True)
class PlanningFaults:
    """Contains the errors of one dispatcher."""

    dispatcher: Dispatcher
    lines: Mapping[str, ModelLine]  # by model
    resolve: Callable[[Iterable[tuple[str, Outcome]]], None]
    wake: Callable[[], None]

    @contextmanager
    def contained(self) -> Iterator[None]:
        """Go on after an error, unless it is intended, or planning again would not tell whom it is about."""
        try:
            yield
        except BaseException as error:
            let_pass(error)
            at_work = self.dispatcher.at_work
            guilty = self._are_about(at_work)
            if guilty is None:
                raise
            self._give_up(guilty, at_work, report(error, str(at_work)))
            self.wake()  # the others have yet to be planned for

    def _are_about(self, at_work: PlannedFor) -> set[str] | None:
        """Return who is at fault; empty: it is not known yet. None: it will not be known."""
        lonely, names = self.dispatcher.lonely, at_work.names
        if names - lonely:
            lonely |= names
            return set()
        return names if len(names) == 1 else None

    def _give_up(self, guilty: set[str], at_work: PlannedFor, text: str) -> None:
        """Fail the guilty. Samples are planned anew, since what was noted for them may be half done."""
        if at_work.samples:
            self.resolve(self.dispatcher.restart_sampling(guilty))
            self.resolve((request_id, Failed(text, "server")) for request_id in guilty & at_work.samples)
        for model in at_work.models if guilty else ():
            model.give_up_next(NotPlanned(text))
            if model.refusal is not None:
                self.lines[model.id].refuse(model.refusal)
