"""The state of each request that the scheduler is concerned with, in one table. It outlives the workers."""

from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass
from enum import Enum, Flag, auto
from typing import TypeVar

from spmd_tx.coordinator.requests.quarantine import Quarantine
from spmd_tx.coordinator.requests.records import Request
from spmd_tx.coordinator.sampling.job import SampleJob

Result = TypeVar("Result")


class RequestStatus(Enum):
    """Says how far a request is with the present workers."""

    WAITING = auto()  # nothing has begun
    BEGUN = auto()  # its commands may be out; a sample is in the batch, or about to join it
    GIVEN_UP = auto()  # the operator has failed it before its turn; its line has yet to pass over it
    AGAIN = auto()  # it has its outcome, and runs again for its effect on a model that is restored
    ENDED = auto()  # nothing is left to do for it; it is no longer in the table


class Danger(Flag):
    """Says what a request may do to others. It is kept apart from them until it has ended."""

    WORKERS = auto()  # its command may end the workers: it runs alone on the devices
    PLANNING = auto()  # planning for it may fail: it has commands of its own, with the present workers
    SERVER = auto()  # computing for it may end this process: nothing else computes in a thread


HARMLESS = Danger(0)


@dataclass(eq=False)
class RequestState:
    """Holds what the scheduler knows of a request until it has ended::

        accepted ─▶ WAITING ── its turn ──▶ BEGUN ── its outcome, or its cancellation ──▶ ENDED
                     │   ▲                    │
                     │   └─ workers are lost ─┘
                     ├─ it fails, or is cancelled ──▶ ENDED
                     └─ given up by the operator ──▶ GIVEN_UP ── its turn, or workers are lost ──▶ ENDED

        executed, and the workers are lost ──▶ AGAIN ── it has run again ──▶ ENDED

    A request is unfinished, that is, without an outcome, while it is ``WAITING`` or ``BEGUN``. The end of its
    session ends the other two. Dangers do not depend on the status; they end with the request, and
    ``PLANNING`` with the workers.
    """

    request: Request
    status: RequestStatus = RequestStatus.WAITING
    dangers: Danger = HARMLESS  # set by the table
    job: SampleJob | None = None  # of a sample that lost its workers: the tokens that are known
    tokens: int = 0  # of a sample, at most; 0: nobody needs to know
    given_up_because: str = ""  # only of those given up

    @property
    def is_unfinished(self) -> bool:
        return self.status in (RequestStatus.WAITING, RequestStatus.BEGUN)

    @property
    def is_suspect(self) -> bool:
        return Danger.WORKERS in self.dangers

    @property
    def is_lonely(self) -> bool:
        return Danger.PLANNING in self.dangers


class RequestTable:
    """Holds the states of all requests, in the order of their acceptance, and which sessions have ended."""

    def __init__(self, quarantine: Quarantine, unfinished: Iterable[Request] = ()) -> None:
        self._quarantine = quarantine
        self._states: dict[str, RequestState] = {}  # by request
        self._by_session: dict[str, dict[str, RequestState]] = {}
        self._by_line: dict[str, dict[str, RequestState]] = {}
        self._dangerous: dict[str, RequestState] = {}  # few, if any
        self._ended_sessions: set[str] = set()
        self.sample_tokens = 0  # of unfinished samples, at most
        quarantine.watch(lambda: bool(self.in_danger_of(Danger.SERVER)))
        for request in unfinished:
            self.add(request)

    def get(self, request_id: str) -> RequestState | None:
        return self._states.get(request_id)

    def find_unfinished(self, request_id: str) -> RequestState | None:
        state = self._states.get(request_id)
        return state if state is not None and state.is_unfinished else None

    def unfinished(self) -> list[Request]:
        return [state.request for state in self._states.values() if state.is_unfinished]

    def unfinished_of_line(self, line: str) -> list[Request]:
        return [each.request for each in self._by_line.get(line, {}).values() if each.is_unfinished]

    @property
    def sessions_at_work(self) -> set[str]:
        """The sessions of unfinished requests."""
        return {request.session_id for request in self.unfinished()}

    @property
    def has_unfinished(self) -> bool:
        return any(state.is_unfinished for state in self._states.values())

    def add(
        self,
        request: Request,
        status: RequestStatus = RequestStatus.WAITING,
        *,
        job: SampleJob | None = None,
        tokens: int = 0,
    ) -> None:
        state = self._states[request.id] = RequestState(request, status, job=job, tokens=tokens)
        self.sample_tokens += tokens
        self._by_session.setdefault(request.session_id, {})[request.id] = state
        self._by_line.setdefault(request.line, {})[request.id] = state

    def remove(self, request_id: str) -> None:
        """End a request. Unknown ones are ignored."""
        state = self._states.pop(request_id, None)
        if state is None:
            return
        state.status = RequestStatus.ENDED
        self.sample_tokens -= state.tokens
        self._dangerous.pop(request_id, None)
        request = state.request
        for index, name in ((self._by_session, request.session_id), (self._by_line, request.line)):
            del index[name][request_id]
            if not index[name]:
                del index[name]

    def give_up(self, state: RequestState, why: str) -> None:
        """Keep a request that has failed before its turn, for its line to pass over. Samples are in none."""
        if state.request.kind == "sample":
            self.remove(state.request.id)
            return
        self._set_dangers(state, HARMLESS)
        state.status, state.given_up_because = RequestStatus.GIVEN_UP, why

    # --- sessions -------------------------------------------------------------------------------------

    def end_session(self, session_id: str) -> None:
        self._ended_sessions.add(session_id)

    def has_ended(self, session_id: str) -> bool:
        return session_id in self._ended_sessions

    def works_for(self, session_id: str) -> bool:
        """Whether a request of a session is unfinished."""
        return any(state.is_unfinished for state in self._by_session.get(session_id, {}).values())

    def forget_session(self, session_id: str) -> None:
        """Remove what is left of a session without unfinished requests."""
        for request_id in list(self._by_session.get(session_id, ())):
            self.remove(request_id)

    # --- generations of workers -----------------------------------------------------------------------

    def start_generation(self, again: Collection[Request]) -> None:
        """Add the requests that new workers will run again, and see who may end this process."""
        ids = {request.id for request in again}
        for state in list(self._states.values()):
            if state.status is RequestStatus.AGAIN and state.request.id not in ids:
                self.remove(state.request.id)
        for request in again:
            if request.id not in self._states:  # else it was to run again with the last workers, too
                self.add(request, RequestStatus.AGAIN)
        for request_id, state in self._states.items():
            if self._quarantine.is_suspect(request_id):
                self._set_dangers(state, state.dangers | Danger.SERVER)

    def end_generation(self) -> None:
        """Let everything unfinished wait again: the workers are lost."""
        for state in list(self._states.values()):
            if state.status is RequestStatus.GIVEN_UP:
                self.remove(state.request.id)
                continue
            if state.status is RequestStatus.BEGUN:
                state.status = RequestStatus.WAITING
            self._set_dangers(state, state.dangers & ~Danger.PLANNING)

    # --- dangers --------------------------------------------------------------------------------------

    def suspect(self, request_ids: Iterable[str]) -> None:
        """Note that a command of these requests may have ended the workers. Those that ended are ignored."""
        for request_id in request_ids:
            state = self._states.get(request_id)
            if state is not None and state.status is not RequestStatus.GIVEN_UP:
                self._set_dangers(state, state.dangers | Danger.WORKERS)

    def isolate(self, state: RequestState) -> None:
        """Note that planning may have failed because of this request."""
        self._set_dangers(state, state.dangers | Danger.PLANNING)

    def in_danger_of(self, danger: Danger) -> list[RequestState]:
        """List the requests that may do this."""
        return [state for state in self._dangerous.values() if danger in state.dangers]

    @property
    def has_suspects(self) -> bool:
        return bool(self._dangerous) and bool(self.in_danger_of(Danger.WORKERS))

    async def mark(self, request_id: str, work: Callable[[], Awaitable[Result]]) -> Result:
        """Do work for a request, whose computing is marked in a file that outlives this process."""
        return await self._quarantine.at_work.during(request_id, work, self._quarantine.is_careful)

    def _set_dangers(self, state: RequestState, dangers: Danger) -> None:
        state.dangers = dangers
        if dangers:
            self._dangerous[state.request.id] = state
        else:
            self._dangerous.pop(state.request.id, None)
