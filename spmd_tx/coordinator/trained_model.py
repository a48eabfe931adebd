"""A model of a client: where it is on the device, if it is, and what it has ready to be sent, in order."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from spmd_tx.coordinator.batching import Chunk, ChunkOutput
from spmd_tx.errors import MeshError
from spmd_tx.protocol import AdapterSpec, AnyCommand
from spmd_tx.reports import Reply

MOST_UNSENT = 4  # steps that are prepared ahead


@dataclass(eq=False)
class ChunkStep:
    """A part of a forward or forward_backward request; chunks of other models may share its command."""

    request_id: str
    chunk: Chunk
    output: asyncio.Future[ChunkOutput] = field(default_factory=asyncio.Future)

    @property
    def may_change_state(self) -> bool:
        return not self.chunk.forward_only

    def lose(self, error: MeshError) -> None:
        fail(self.output, error)


@dataclass(eq=False)
class CommandStep:
    """Commands that are made when they are sent, together. The reply to the last one counts."""

    request_id: str
    make: Callable[[], list[AnyCommand]]
    needs_slot: bool = True
    reply: asyncio.Future[Reply] = field(default_factory=asyncio.Future)

    @property
    def may_change_state(self) -> bool:
        return self.needs_slot

    def lose(self, error: MeshError) -> None:
        fail(self.reply, error)


Step = ChunkStep | CommandStep


def fail(answer: asyncio.Future[Any], error: MeshError) -> None:
    """Give an error to whoever waits; that nobody does is no reason to complain."""
    if not answer.done():
        answer.set_exception(error)
        answer.exception()


class TrainedModel:
    """Steps are put in by the one task that carries out the model's requests, and taken out to be sent."""

    def __init__(self, id: str, session_id: str, on_step: Callable[[], None]) -> None:
        self.id = id
        self.session_id = session_id
        self.refusal: str | None = None  # why no request is carried out: the creation failed
        self.unsent: deque[Step] = deque()
        self.request_id = ""  # of the request whose steps are put in now
        self.errand: str | None = None  # what its request waits for that goes on beside the commands
        self.has_more: Callable[[], bool] = lambda: False  # whether requests will soon put in more steps
        self.effects = 0  # steps put in so far that may change its state
        self._lost: MeshError | None = None
        self._slot: int | None = None
        self._adapter: AdapterSpec | None = None
        self._on_step = on_step
        self._sent = asyncio.Event()

    @property
    def slot(self) -> int:
        assert self._slot is not None, f"{self.id} has no slot"
        return self._slot

    @property
    def adapter(self) -> AdapterSpec:
        assert self._adapter is not None, f"{self.id} has no adapter"
        return self._adapter

    @property
    def has_slot(self) -> bool:
        return self._slot is not None

    def occupy(self, slot: int) -> None:
        self._slot = slot

    def vacate(self) -> None:
        self._slot = None

    def become(self, adapter: AdapterSpec) -> None:
        self._adapter = adapter

    def put_chunk(self, chunk: Chunk) -> asyncio.Future[ChunkOutput]:
        step = ChunkStep(self.request_id, chunk)
        self._put(step)
        return step.output

    def put(self, command: AnyCommand) -> asyncio.Future[Reply]:
        """A command that needs no slot."""
        return self._put_step(CommandStep(self.request_id, lambda: [command], needs_slot=False))

    def put_later(self, make: Callable[[], list[AnyCommand]]) -> asyncio.Future[Reply]:
        """Commands that are made when the model has its slot."""
        return self._put_step(CommandStep(self.request_id, make))

    def _put_step(self, step: CommandStep) -> asyncio.Future[Reply]:
        self._put(step)
        return step.reply

    def take(self) -> Step:
        """The next step, which must be sent now."""
        step = self.unsent.popleft()
        self._sent.set()
        return step

    async def room(self) -> None:
        """Return when there is room to prepare more."""
        while len(self.unsent) >= MOST_UNSENT and self._lost is None:
            self._sent.clear()
            await self._sent.wait()

    def lose(self, error: MeshError) -> None:
        """No step will be sent any more."""
        self._lost = error
        while self.unsent:
            self.unsent.popleft().lose(error)
        self._sent.set()

    def _put(self, step: Step) -> None:
        if self._lost is not None:
            step.lose(self._lost)
            return
        self.unsent.append(step)
        self.effects += step.may_change_state
        self._on_step()
