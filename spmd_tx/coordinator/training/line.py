"""Model lines: requests of a model wait for their turn by seq_id, and some are replayed after a loss.

A line knows the order of one model's requests and how long it waits for a missing number. A model line adds
what a restored model has to run again. The waiting lines of all models move on together.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from spmd_tx.coordinator.checkpoints.snapshots import StoredSnapshot
from spmd_tx.coordinator.requests.records import (
    CHANGES_STATE,
    CHUNKED_KINDS,
    Executed,
    Request,
    not_run_again,
)
from spmd_tx.coordinator.training.model import TrainedModel
from spmd_tx.errors import InvalidRequest, MeshError

LATER_CALL_SECONDS = 2.0  # how long a gap stays open once a later call has arrived
SILENCE_SECONDS = 60.0  # how long a gap stays open after the last arrival otherwise

MOST_CONSUMED = 1 << 16  # numbers of refused requests that are remembered; further ones are gaps


class RequestLine:
    """Orders the waiting requests of one model. ``now`` is the time of any steady clock, in seconds.

    A gap of any width is one jump, so no call takes longer for a number far ahead.
    """

    def __init__(self, model_id: str, next_seq_id: int = 0, closed: Iterable[int] = ()) -> None:
        """Continue with ``next_seq_id`` (0: creation) and skip the ``closed`` numbers."""
        self._model_id = model_id
        self._next = next_seq_id
        # By seq_id, in the order of arrival: the request and its time of arrival
        self._waiting: OrderedDict[int, tuple[Request, float]] = OrderedDict()
        self._later_calls: OrderedDict[int, float] = OrderedDict()  # those that are not chunks of a call
        self._numbers: list[int] = []  # a heap of the waiting numbers
        self._consumed = set(closed)

    def arrive(self, request: Request, now: float) -> None:
        """Add a request. Raises InvalidRequest when the line has already gone on without it."""
        if request.seq_id < self._next:
            raise InvalidRequest(
                f"request {request.seq_id} of {self._model_id} came after the service had given up waiting "
                f"for it and gone on to request {self._next}; it was not run, send it again as a new request"
            )
        if request.seq_id not in self._waiting:
            heappush(self._numbers, request.seq_id)
        self._waiting[request.seq_id] = (request, now)
        if request.kind not in CHUNKED_KINDS:
            self._later_calls[request.seq_id] = now

    def consume(self, seq_id: int) -> None:
        """Skip a number whose request was refused."""
        if seq_id >= self._next and len(self._consumed) < MOST_CONSUMED:
            self._consumed.add(seq_id)

    def release(self, now: float) -> list[Request]:
        """Return the requests whose turn has come, in order."""
        released: list[Request] = []
        has_jumped = False
        while self._waiting:
            if self._next == self._numbers[0]:
                released.append(self._take_first())
                self._next += 1
            elif self._next in self._consumed:
                self._consumed.discard(self._next)
                self._next += 1
            elif now >= self._gap_closes_at():
                self._next = self._numbers[0]
                has_jumped = True
            else:
                break
        if has_jumped:
            self._consumed = {seq_id for seq_id in self._consumed if seq_id >= self._next}
        return released

    def wake_at(self) -> float | None:
        """Return when ``release`` must be called again if nothing arrives before; None: no need."""
        return self._gap_closes_at() if self._waiting else None

    @property
    def missing(self) -> int | None:
        """The number that the whole line waits for."""
        return self._next if self._waiting else None

    def _take_first(self) -> Request:
        seq_id = heappop(self._numbers)
        self._later_calls.pop(seq_id, None)
        return self._waiting.pop(seq_id)[0]

    def _gap_closes_at(self) -> float:
        _, last_arrival = next(reversed(self._waiting.values()))
        silence = last_arrival + SILENCE_SECONDS
        first_later_call = next(iter(self._later_calls.values()), None)
        return silence if first_later_call is None else min(silence, first_later_call + LATER_CALL_SECONDS)


@dataclass(frozen=True)
class Restoration:
    """Says how a model's line continues with new workers."""

    model_id: str
    session_id: str
    refusal: str | None = None  # why the model cannot be used: it was never created, or cannot be restored
    start: StoredSnapshot | None = None  # None: starts with the request that creates the model
    again: dict[str, Executed] = field(default_factory=dict)  # requests to replay, by id: outcome known
    requests: list[Request] = field(default_factory=list)  # to run first: the replayed ones and any between
    next_seq_id: int = 0
    closed: frozenset[int] = frozenset()  # later numbers that need nothing


class ModelLine:
    """Holds a model's line in one generation of workers, and tracks its restoration."""

    def __init__(self, restoration: Restoration, tenant: str, on_step: Callable[[], None]) -> None:
        """Open the line of a model of this tenant; ``on_step`` as in TrainedModel."""
        model_id, session_id = restoration.model_id, restoration.session_id
        self.model = TrainedModel(model_id, session_id, tenant, on_step, self._has_more)
        self.model.refusal = restoration.refusal
        self.line = RequestLine(model_id, restoration.next_seq_id, restoration.closed)
        self.start = restoration.start
        self.again = restoration.again
        self.turn: asyncio.Queue[Request | None] = asyncio.Queue()  # None: there are no more
        self.restored = asyncio.Event()  # the model has its state of before the loss
        self.task: asyncio.Task[None] | None = None
        self.stepped: int | None = None  # seq_id of the optimizer step that made the present state
        self._missing = set(restoration.again)
        self._overtaken = {request.id for request in restoration.requests} - self._missing
        self._is_beginning = False
        for request in restoration.requests:
            self.turn.put_nowait(request)
        self._note_whether_restored()

    @property
    def to_run_again(self) -> int:
        """How many requests have yet to be replayed."""
        return len(self._missing)

    async def next(self) -> Request | None:
        """Wait for the next request, once those before it have begun; None: there are no more."""
        self._is_beginning = False
        request = await self.turn.get()
        self._is_beginning = request is not None
        return request

    def begun(self, request: Request) -> None:
        if request.kind in CHANGES_STATE:
            self.stepped = request.seq_id if request.kind == "optim_step" else None

    def ran_again(self, request: Request) -> None:
        self._missing.discard(request.id)
        self._note_whether_restored()

    def pass_over(self, request: Request, why: str) -> None:
        """Skip a request that has failed already.

        The model is refused if it needs this request: lost workers had executed it and gone on behind it.
        """
        if request.seq_id == 0:
            self.refuse(f"{self.model.id} was not created: {why}")
        elif request.id in self._overtaken and request.kind in CHANGES_STATE:
            self.refuse(not_run_again(self.model.id, request.seq_id, why))

    def refuse(self, why: str) -> None:
        """Refuse all later requests of the model."""
        self.model.refusal = why
        self.stepped = None  # take no snapshot of it
        self._missing.clear()
        self._note_whether_restored()

    def lose(self, error: MeshError) -> None:
        """End everything that waits: the workers are lost."""
        self.model.lose(error)
        self.turn.put_nowait(None)
        self.restored.set()

    def _has_more(self) -> bool:
        return self._is_beginning or not self.turn.empty()

    def _note_whether_restored(self) -> None:
        if not self._missing:
            self.restored.set()


class WaitingLines:
    """Holds the lines with waiting requests. Only lines that changed or are due are visited."""

    def __init__(self) -> None:
        self._changed: dict[str, ModelLine] = {}  # by model
        self._due: dict[str, tuple[float, ModelLine]] = {}  # by model: when its first gap closes
        self._alarms: list[tuple[float, str]] = []  # a heap of these times; some are outdated

    def add(self, entry: ModelLine) -> None:
        """Visit a line, in which a request has arrived or a number was refused."""
        self._changed[entry.model.id] = entry

    def discard(self, entry: ModelLine) -> None:
        self._changed.pop(entry.model.id, None)
        self._due.pop(entry.model.id, None)

    def release(self, now: float) -> float | None:
        """Move the lines on; return when to call again if nothing happens before; None: no need."""
        for entry in list(self._changed.values()):
            self._move_on(entry, now)
        self._changed.clear()
        while self._alarms:
            wake_at, model_id = self._alarms[0]
            due_at, entry = self._due.get(model_id, (None, None))
            if due_at == wake_at > now:
                return wake_at
            heappop(self._alarms)
            if entry is not None and due_at == wake_at:
                self._move_on(entry, now)
        return None

    def _move_on(self, entry: ModelLine, now: float) -> None:
        for request in entry.line.release(now):
            entry.turn.put_nowait(request)
        model_id, wake_at = entry.model.id, entry.line.wake_at()
        due = self._due.pop(model_id, None)
        if wake_at is not None:
            self._due[model_id] = wake_at, entry
            if due is None or due[0] != wake_at:
                heappush(self._alarms, (wake_at, model_id))
