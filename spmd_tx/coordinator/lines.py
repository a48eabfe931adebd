"""One model's requests in the order of their seq_id, whatever the order of their arrival. No clock, no I/O.

A client numbers its requests before it sends them, sends the chunks of one call at once and the first
chunk last, and never sends a call before the previous call's requests were answered. Numbers that
were refused, or never sent, leave gaps.
"""

from collections import OrderedDict
from collections.abc import Iterable
from heapq import heappop, heappush

from spmd_tx.coordinator.requests.records import CHUNKED_KINDS, Request
from spmd_tx.errors import InvalidRequest

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
