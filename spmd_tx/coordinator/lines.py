"""One model's requests in the order of their seq_id, whatever the order of their arrival. No clock, no I/O.

A client numbers its requests before it sends them, sends the chunks of one call at once and the first
chunk last, and never sends a call before the previous call's requests were answered. Numbers that
were refused, or never sent, leave gaps.
"""

from collections.abc import Iterable

from spmd_tx.coordinator.request_queue import Request
from spmd_tx.errors import InvalidRequest

# Only these come in chunks; any other kind waiting beyond a gap proves that the call with the gap is over.
CHUNKED_KINDS = frozenset({"forward", "forward_backward"})

LATER_CALL_SECONDS = 2.0  # how long a gap stays open once a later call has arrived
SILENCE_SECONDS = 60.0  # how long it stays open after the last arrival otherwise


class Line:
    """The requests of one model that wait for their turn. ``now`` is any steady clock, in seconds."""

    def __init__(self, model_id: str, next_seq_id: int = 0, closed: Iterable[int] = ()) -> None:
        """A line that goes on with ``next_seq_id`` (0: creation), and without the ``closed`` numbers."""
        self._model_id = model_id
        self._next = next_seq_id
        self._waiting: dict[int, tuple[Request, float]] = {}  # by seq_id: the request, when it arrived
        self._consumed = set(closed)

    def arrive(self, request: Request, now: float) -> None:
        """Take a request in; refused when the line has already gone on without it."""
        if request.seq_id < self._next:
            raise InvalidRequest(
                f"request {request.seq_id} of {self._model_id} came after the service had given up waiting "
                f"for it and gone on to request {self._next}; it was not run, send it again as a new request"
            )
        self._waiting[request.seq_id] = (request, now)

    def consume(self, seq_id: int) -> None:
        """Nothing will come under this number: its request was refused."""
        if seq_id >= self._next:
            self._consumed.add(seq_id)

    def release(self, now: float) -> list[Request]:
        """The requests whose turn has come, in order."""
        released: list[Request] = []
        while self._waiting:
            if self._next in self._waiting:
                released.append(self._waiting.pop(self._next)[0])
            elif self._next not in self._consumed and now < self._gap_closes_at():
                break
            self._consumed.discard(self._next)
            self._next += 1
        return released

    def wake_at(self) -> float | None:
        """When ``release`` should be called again if nothing else happens before; None: no need."""
        return self._gap_closes_at() if self._waiting else None

    @property
    def missing(self) -> int | None:
        """The number that everything in the line is waiting for."""
        return self._next if self._waiting else None

    def _gap_closes_at(self) -> float:
        silence = max(arrived for _, arrived in self._waiting.values()) + SILENCE_SECONDS
        later_calls = [at for request, at in self._waiting.values() if request.kind not in CHUNKED_KINDS]
        return min(silence, min(later_calls) + LATER_CALL_SECONDS) if later_calls else silence
