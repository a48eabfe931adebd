"""A trained model: its slot on the device, if it has one, and its steps that are ready to be sent."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from spmd_tx.coordinator.requests.sample_notes import Holders, owner_holder
from spmd_tx.coordinator.runtime.futures import fail
from spmd_tx.coordinator.training.batching import Chunk, ChunkOutput
from spmd_tx.errors import Abandoned, MeshError, NotLoaded, NotSent
from spmd_tx.protocol.commands import AdapterSpec, AnyCommand
from spmd_tx.protocol.programs import ProgramShape
from spmd_tx.protocol.reports import Reply

MOST_UNSENT = 4  # steps that are prepared ahead
HALF_DONE = "the server failed in the middle of one of its requests"


@dataclass(eq=False)
class ChunkStep:
    """Holds a chunk of a forward or forward_backward request, which may share its command with others."""

    request_id: str
    chunk: Chunk
    programs: Sequence[ProgramShape]  # of this chunk and later ones: a request runs wholly or not at all
    has_programs: bool = False  # whether all are known to be ready
    needs_slot: ClassVar[bool] = True
    output: asyncio.Future[ChunkOutput] = field(default_factory=asyncio.Future)

    @property
    def may_change_state(self) -> bool:
        return not self.chunk.forward_only

    def lose(self, error: BaseException) -> None:
        fail(self.output, error)


@dataclass(eq=False)
class CommandStep:
    """Makes commands when they are sent, together. The reply to the last one counts."""

    request_id: str
    make: Callable[[], list[AnyCommand]]
    needs: Callable[[], Sequence[ProgramShape]] = tuple  # the programs of the commands that it would make now
    needs_slot: bool = True
    fills_slot: bool = False  # the model has no state without it
    has_programs: bool = False  # never cached: what it needs depends on when it is sent
    reply: asyncio.Future[Reply] = field(default_factory=asyncio.Future)

    @property
    def programs(self) -> Sequence[ProgramShape]:
        return self.needs()

    @property
    def may_change_state(self) -> bool:
        return self.needs_slot

    def lose(self, error: BaseException) -> None:
        fail(self.reply, error)


ModelStep = ChunkStep | CommandStep


@dataclass(eq=False)
class TrainedModel:
    """Queues the steps of a model: the task of its line adds them, the dispatcher takes them."""

    id: str
    session_id: str
    tenant: str
    on_step: Callable[[], None]  # is called with each new step
    has_more: Callable[[], bool] = lambda: False  # whether requests will soon add steps
    refusal: str | None = None  # why no request is executed: for example, its creation failed
    unsent: deque[ModelStep] = field(default_factory=deque[ModelStep])
    missing: Sequence[ProgramShape] = ()  # programs that the next step waits for, as of the last look
    request_id: str = ""  # of the request whose steps are added now
    errand: str | None = None  # what its request waits for besides commands
    is_lonely: bool = False  # planning a step of the server's own may have failed: it shares no command
    effects: int = 0  # steps added so far that may change its state
    seat: int | None = None  # its slot, if it has one
    _lost: MeshError | None = None
    _sent_last: str = ""  # the request whose step was sent last
    _changed_last: str = ""  # the last one with a step sent that may change the state
    _adapter: AdapterSpec | None = None
    _sent: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def slot(self) -> int:
        assert self.seat is not None, f"{self.id} has no slot"
        return self.seat

    @property
    def adapter(self) -> AdapterSpec:
        assert self._adapter is not None, f"{self.id} has no adapter"
        return self._adapter

    @property
    def note_holders(self) -> Holders:
        """Whose notes of samples it may train on: its session's, and those of its owner's trajectories."""
        return self.session_id, owner_holder(self.tenant)

    @property
    def has_slot(self) -> bool:
        return self.seat is not None

    def become(self, adapter: AdapterSpec) -> None:
        self._adapter = adapter

    def stay(self, adapter: AdapterSpec | None, error: NotLoaded) -> None:
        """Go on with the adapter of before a load that was refused; None: there was none."""
        if adapter is None:
            self.refusal = f"{self.id} was not created: {error}"
        else:
            self.become(adapter)

    def put_chunks(self, chunks: Sequence[Chunk]) -> list[asyncio.Future[ChunkOutput]]:
        """Add all chunks of a request; none is sent before the programs of all are ready."""
        programs = tuple(dict.fromkeys(program for chunk in chunks for program in chunk.programs))
        steps = [ChunkStep(self.request_id, chunk, programs) for chunk in chunks]
        for step in steps:
            self._put(step)
        return [step.output for step in steps]

    def put(self, command: AnyCommand) -> asyncio.Future[Reply]:
        """Add a command that needs no slot."""
        return self.put_later(lambda: [command], tuple, needs_slot=False)

    def put_later(
        self,
        make: Callable[[], list[AnyCommand]],
        needs: Callable[[], Sequence[ProgramShape]],
        *,
        fills_slot: bool = False,
        needs_slot: bool = True,
    ) -> asyncio.Future[Reply]:
        """Add commands that are made when the model has its slot and their programs are ready."""
        step = CommandStep(self.request_id, make, needs, needs_slot=needs_slot, fills_slot=fills_slot)
        self._put(step)
        return step.reply

    def take(self) -> ModelStep:
        """Remove and return the next step, which must be sent now."""
        step = self.unsent.popleft()
        self._sent_last = step.request_id
        if step.may_change_state:
            self._changed_last = step.request_id
        self._sent.set()
        return step

    def give_up_next(self, error: NotSent) -> None:
        """Fail the next step and with it its request. The model is refused if it has half of that request."""
        first = self.unsent[0]
        is_empty = isinstance(first, CommandStep) and first.fills_slot
        is_half_done = bool(first.request_id) and first.request_id == self._changed_last
        if is_empty:
            self.refusal = f"{self.id} has no weights: {error}"
        elif is_half_done:
            self.refusal = f"{self.id} cannot be used before the workers are started again: {HALF_DONE}"
        kept: deque[ModelStep] = deque()
        for step in self.unsent:
            is_of_it = step is first or (step.request_id and step.request_id == first.request_id)
            if is_empty or is_half_done or is_of_it:
                step.lose(error)
            else:
                kept.append(step)
        self.unsent, self.missing = kept, ()
        self._sent.set()

    def withdraw(self, request_id: str) -> bool:
        """Remove the steps of a request, which has added all of them; return False if any was sent."""
        withdrawn = [step for step in self.unsent if step.request_id == request_id]
        if not withdrawn or self._sent_last == request_id:
            return False
        self.unsent, self.missing = deque(each for each in self.unsent if each.request_id != request_id), ()
        for step in withdrawn:
            step.lose(Abandoned("it was given up"))
        self._sent.set()
        return True

    async def room(self) -> None:
        """Wait until more steps may be prepared."""
        while len(self.unsent) >= MOST_UNSENT and self._lost is None:
            self._sent.clear()
            await self._sent.wait()

    def lose(self, error: MeshError) -> None:
        """Fail all steps, present and future: the workers are lost."""
        self._lost = error
        while self.unsent:
            self.unsent.popleft().lose(error)
        self._sent.set()

    def _put(self, step: ModelStep) -> None:
        if self._lost is not None:
            step.lose(self._lost)
            return
        self.unsent.append(step)
        self.effects += step.may_change_state
        self.on_step()
