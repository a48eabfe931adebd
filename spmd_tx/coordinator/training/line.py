"""A model in one generation of workers: the order of its requests, and which of them are run again."""

import asyncio
from collections import OrderedDict
from collections.abc import Iterable
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
SILENCE_SECONDS = 60.0  # how long it stays open after the last arrival otherwise

MOST_CONSUMED = 1 << 16  # numbers of refused requests that are remembered; others are gaps like any


class Line:
    """The requests of one model that wait for their turn. ``now`` is any steady clock, in seconds.

    No call takes longer for a number far ahead, nor for many that wait: a gap of any width is one jump.
    """

    def __init__(self, model_id: str, next_seq_id: int = 0, closed: Iterable[int] = ()) -> None:
        """A line that goes on with ``next_seq_id`` (0: creation), and without the ``closed`` numbers."""
        self._model_id = model_id
        self._next = next_seq_id
        # By seq_id, in the order of arrival: the request, when it arrived
        self._waiting: OrderedDict[int, tuple[Request, float]] = OrderedDict()
        self._later_calls: OrderedDict[int, float] = OrderedDict()  # those of them that come in no chunks
        self._numbers: list[int] = []  # a heap of those that wait
        self._consumed = set(closed)

    def arrive(self, request: Request, now: float) -> None:
        """Take a request in; refused when the line has already gone on without it."""
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
        """Nothing will come under this number: its request was refused."""
        if seq_id >= self._next and len(self._consumed) < MOST_CONSUMED:
            self._consumed.add(seq_id)

    def release(self, now: float) -> list[Request]:
        """The requests whose turn has come, in order."""
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
        """When ``release`` should be called again if nothing else happens before; None: no need."""
        return self._gap_closes_at() if self._waiting else None

    @property
    def missing(self) -> int | None:
        """The number that everything in the line is waiting for."""
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
    """How a model's line goes on with new workers."""

    model_id: str
    session_id: str
    refusal: str | None = None  # why the model cannot be used: it was never created, or it is beyond repair
    start: StoredSnapshot | None = None  # None: the first request, which creates it
    again: dict[str, Executed] = field(default_factory=dict)  # requests whose outcome is known, by id
    requests: list[Request] = field(default_factory=list)  # to carry out first: those, and any in between
    next_seq_id: int = 0
    closed: frozenset[int] = frozenset()  # numbers from there on for which nothing has to be done


class ModelLine:
    """Requests come in by their number, and go out when their turn has come."""

    def __init__(self, model: TrainedModel, restoration: Restoration | None = None) -> None:
        how = restoration or Restoration(model.id, model.session_id)
        self.model = model
        self.line = Line(model.id, how.next_seq_id, how.closed)
        self.start = how.start
        self.again = how.again
        self.turn: asyncio.Queue[Request | None] = asyncio.Queue()  # None: there are no more
        self.restored = asyncio.Event()  # all that was known of the model is there again
        self.task: asyncio.Task[None] | None = None
        self.stepped: int | None = None  # the optimizer step that the state has not changed since
        self._missing = set(how.again)
        self._overtaken = {request.id for request in how.requests} - self._missing
        self._is_beginning = False
        model.has_more = lambda: self._is_beginning or not self.turn.empty()
        model.refusal = how.refusal
        for request in how.requests:
            self.turn.put_nowait(request)
        self._note_whether_restored()

    @property
    def to_run_again(self) -> int:
        """How many requests are still to be run again."""
        return len(self._missing)

    async def next(self) -> Request | None:
        """The request whose turn it is, when those before it have begun; None: there are no more."""
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
        """The turn has come of a request that has failed already.

        The model can do without it, unless it once had its effect: workers that are gone went on behind it.
        """
        if request.seq_id == 0:
            self.refuse(f"{self.model.id} was not created: {why}")
        elif request.id in self._overtaken and request.kind in CHANGES_STATE:
            self.refuse(not_run_again(self.model.id, request.seq_id, why))

    def refuse(self, why: str) -> None:
        """The model cannot be used any more."""
        self.model.refusal = why
        self.stepped = None  # no snapshot is to be taken of it
        self._missing.clear()
        self._note_whether_restored()

    def lose(self, error: MeshError) -> None:
        """The workers are gone; everything that waits ends."""
        self.model.lose(error)
        self.turn.put_nowait(None)
        self.restored.set()

    def _note_whether_restored(self) -> None:
        if not self._missing:
            self.restored.set()


class WaitingLines:
    """The lines with requests whose turn has not come. Only those that changed, or are due, are looked at."""

    def __init__(self) -> None:
        self._changed: dict[str, ModelLine] = {}  # by model
        self._due: dict[str, tuple[float, ModelLine]] = {}  # by model: when its first gap is closed
        self._alarms: list[tuple[float, str]] = []  # a heap of these times, also of those that have changed

    def add(self, entry: ModelLine) -> None:
        """A request has arrived there, or a number was refused."""
        self._changed[entry.model.id] = entry

    def discard(self, entry: ModelLine) -> None:
        self._changed.pop(entry.model.id, None)
        self._due.pop(entry.model.id, None)

    def release(self, now: float) -> float | None:
        """Move all of them on; when that should be done again if nothing else happens before."""
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
