"""Orders the programs that the steps of models need, and tracks the models that wait for them."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from spmd_tx.coordinator.mesh.compilation import Compilation, SettledProgram
from spmd_tx.coordinator.mesh.program_orders import ProgramRequest
from spmd_tx.coordinator.requests.records import RequestStage
from spmd_tx.coordinator.runtime.containment import contained
from spmd_tx.coordinator.training.model import MOST_UNSENT, ChunkStep, TrainedModel
from spmd_tx.coordinator.training.slots import SWAPS, TrainingSlots
from spmd_tx.errors import CompileFailed
from spmd_tx.protocol.programs import ProgramShape


@dataclass
class StepPrograms:
    """Tracks the programs of models' steps."""

    compilation: Compilation
    slots: TrainingSlots
    note: Callable[[RequestStage, Iterable[str]], None]  # hears who waits for programs, or no longer does
    _awaiting: frozenset[str] = frozenset()  # requests whose next command waits for a program
    _not_compiled: list[SettledProgram] = field(default_factory=list)  # failures that nobody was told of yet

    def settle(self) -> list[SettledProgram]:
        """Return programs that were compiled, or failed. Raises MeshError when the workers are lost."""
        settled = self.compilation.settle()
        self._not_compiled += [each for each in settled if each.error is not None]
        return settled

    def give_up_failed(self, models: Sequence[TrainedModel]) -> None:
        """Fail the requests of these models whose programs could not be compiled."""
        failed, self._not_compiled = self._not_compiled, []
        for settled in failed:
            for model in models:
                if model.unsent and settled.program in model.missing:
                    model.give_up_next(CompileFailed(settled.error))

    def look(self, model: TrainedModel) -> None:
        """Update what a model waits for."""
        model.missing = self.missing(model) if model.unsent else ()

    def missing(self, model: TrainedModel, beside: Collection[TrainedModel] = ()) -> Sequence[ProgramShape]:
        """Return the programs for a model's next step, and for seating it, that are not ready."""
        is_ready, step, missing = self.compilation.orders.is_ready, model.unsent[0], []
        if not step.has_programs:
            missing = [program for program in step.programs if not is_ready(program)]
            # A command may need other programs by the time it is sent.
            step.has_programs = not missing and isinstance(step, ChunkStep)
            for program in step.programs if step.has_programs else ():
                self.compilation.orders.note_use(program)
        if not model.has_slot and step.needs_slot and not all(map(is_ready, SWAPS)):
            missing += [swap for swap in self.slots.programs(model, beside) if not is_ready(swap)]
        return missing

    def order(
        self,
        waiting: Sequence[TrainedModel],
        models: Sequence[TrainedModel],
        samples: Sequence[ProgramRequest],
        on_answer: Callable[[], None],
        *,
        only_awaited: bool,
    ) -> None:
        """Order the programs that models and samples wait for, or those that ``models`` may need later."""
        wanted = [
            ProgramRequest(program, model.session_id, model.unsent[0].request_id)
            for model in waiting
            for program in model.missing
        ]
        wanted += samples
        self.await_for(each.request_id for each in wanted)
        for model in models:
            with contained(f"looking at what {model.id} needs later"):  # it will be looked at again
                wanted += self._wanted_ahead(model)
        self.compilation.advance(wanted, on_answer, only_awaited=only_awaited)

    def await_for(self, request_ids: Iterable[str]) -> None:
        """Set the requests whose next command waits for a program."""
        before, self._awaiting = self._awaiting, frozenset(request_ids)
        if before != self._awaiting:
            self.note("compiled", before - self._awaiting)
            self.note("compiling", self._awaiting - before)

    def _wanted_ahead(self, model: TrainedModel) -> list[ProgramRequest]:
        """Return the programs that steps behind the next one will wait for."""
        is_ready = self.compilation.orders.is_ready
        return [
            ProgramRequest(program, model.session_id, step.request_id)
            for step in islice(model.unsent, 1, MOST_UNSENT)
            if not step.has_programs
            for program in step.programs
            if not is_ready(program)
        ]
