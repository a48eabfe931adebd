"""Accepts requests and outcomes into the durable log, and lets callers wait for outcomes."""

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType

from sqlalchemy import Executable

from spmd_tx.coordinator.requests import loss_counts, outcome_metrics, rows
from spmd_tx.coordinator.requests.backlog import Backlog
from spmd_tx.coordinator.requests.completions import (
    MICROSECONDS,
    Completion,
    CompletionRange,
    Completions,
    SamplerClient,
)
from spmd_tx.coordinator.requests.failures import failure
from spmd_tx.coordinator.requests.group_writer import GroupWriter, Submission, answer, refuse
from spmd_tx.coordinator.requests.payload_files import PayloadFiles
from spmd_tx.coordinator.requests.records import (
    Failed,
    Finished,
    LossCount,
    ModelHistory,
    NewOutcome,
    Outcome,
    Request,
    RequestKind,
    RequestStage,
    RequestTimes,
)
from spmd_tx.coordinator.requests.runs.recent import RecentWork, Timed
from spmd_tx.coordinator.requests.runs.rollout_metrics import RolloutMetrics
from spmd_tx.coordinator.requests.runs.run_news import RunNews
from spmd_tx.coordinator.requests.sample_notes import NoteWriter
from spmd_tx.coordinator.requests.stored import StoredRequests
from spmd_tx.coordinator.runtime import clock, metrics
from spmd_tx.coordinator.runtime.byte_lru import ByteLru
from spmd_tx.coordinator.runtime.containment import let_pass, report
from spmd_tx.coordinator.runtime.trace_context import TRACEPARENT
from spmd_tx.coordinator.storage.database import Database
from spmd_tx.coordinator.storage.disk import DiskGuard
from spmd_tx.coordinator.storage.outages import is_outage, read_before_deadline
from spmd_tx.errors import Abandoned, Unavailable

PAYLOADS_BYTES = 64 << 20  # cached for the scheduler, so that hardly any payload is read again
RESULTS_BYTES = 128 << 20  # cached for clients
NO_IMAGES: Mapping[str, bytes] = MappingProxyType({})
OnRequestEnd = Callable[[Timed, Failed | None], None]  # told of each ended request, and of its failure

SESSIONS_BYTES = 16 << 20  # cached for 200 000 requests
GATHER_ROUNDS = 32  # of the event loop, before a group is written
GATHER_SECONDS = 0.02  # after which no round begins


@dataclass
class _Waiting:
    """Holds a request that is in the log without an outcome."""

    request: Request
    outcome: asyncio.Future[Outcome] = field(default_factory=asyncio.Future)
    times: RequestTimes = field(default_factory=RequestTimes)


class RequestQueue:
    """Accepts requests and outcomes one by one, stores them in groups, and wakes waiting callers.

    Only the task ``run`` writes. Whatever comes in while it writes a group becomes the next group, so that
    one file and one commit serve many requests.
    """

    def __init__(
        self,
        database: Database,
        storage: DiskGuard,
        groups: GroupWriter,
        completions: Completions,
        unfinished: Iterable[Request],
        on_end: OnRequestEnd,
    ) -> None:
        self._on_arrival: Callable[[Request], None] = lambda request: None  # what ``run`` is given
        self._on_end = on_end
        self.completions = completions
        self._database = database
        self._stored = StoredRequests(database, groups.files)
        self._storage = storage
        self._groups = groups
        self._submissions: list[Submission] = []
        self._outcomes: dict[str, Outcome] = {}  # by request_id; not yet stored
        self._work = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._waiting = {request.id: _Waiting(request) for request in unfinished}
        self.samples = Backlog()
        self.recent = RecentWork()
        self.news = RunNews()
        self.rollouts = RolloutMetrics()
        for waiting in self._waiting.values():
            if _is_sample(waiting):
                self.samples.add(waiting.request)
        self._payloads: ByteLru[bytes] = ByteLru(PAYLOADS_BYTES)
        self._results: ByteLru[Outcome] = ByteLru(RESULTS_BYTES)
        self._sessions: ByteLru[str] = ByteLru(SESSIONS_BYTES)  # of finished requests

    async def submit(
        self,
        kind: RequestKind,
        line: str,
        seq_id: int,
        session_id: str,
        payload: bytes,
        *,
        base: str | None = None,
        also: Sequence[Executable] = (),
        refused: Failed | None = None,
        images: Mapping[str, bytes] = NO_IMAGES,
        tokens: int = 0,
    ) -> str:
        """Store and announce a request; return its request_id when it is durable.

        The same (line, seq_id) again gives the same request_id and does nothing more. The statements ``also``
        run in the same transaction. A request that is ``refused`` is stored with that outcome, and not
        announced. ``base`` is the key of its base model, ``tokens`` what a sample takes at most; ``images``
        are the files to which the payload refers, by digest.
        """
        accepted: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        now, trace, also = clock.now(), TRACEPARENT.get(), tuple(also)
        self._submissions.append(
            Submission(
                *(kind, line, seq_id, session_id, base, payload),
                *(also, refused, images, tokens, now, trace, accepted),
            )
        )
        self._wake()
        return await accepted

    def unfinished(self) -> list[Request]:
        """List the requests without an outcome, in the order of acceptance; those of earlier runs, too."""
        return [waiting.request for waiting in self._waiting.values()]

    def note(self, stage: RequestStage, request_ids: Iterable[str]) -> None:
        """Note how far requests have come; those that have outcomes, and unknown ones, are passed over."""
        for request_id in request_ids:
            waiting = self._waiting.get(request_id)
            if waiting is not None:
                waiting.times.note(stage)

    def worked(self, request_ids: Iterable[str], seconds: float) -> None:
        """Note that devices have just worked so long for these requests; unknown ones are passed over."""
        requests = (self._waiting[id].request for id in request_ids if id in self._waiting)
        lines = {(request.session_id, request.line) for request in requests}
        self.recent.worked(lines, seconds, metrics.group())

    def at_work(self) -> list[Timed]:
        """List the requests without an outcome with their times, in the order of acceptance."""
        return [Timed(waiting.request, waiting.times) for waiting in self._waiting.values()]

    def unfinished_of(self, request_ids: Iterable[str]) -> list[Timed]:
        """List those of these requests that have no outcome, with their times."""
        unfinished = (self._waiting[id] for id in request_ids if id in self._waiting)
        return [Timed(waiting.request, waiting.times) for waiting in unfinished]

    async def history(self, line: str, after: int) -> ModelHistory:
        """Read what counts of a model's finished requests with a seq_id beyond ``after``; -1 for all."""
        async with self._database.reading() as db:
            return await rows.history(db, line, after)

    async def count_losses(self, in_flight: Collection[str], blamed: Collection[str]) -> dict[str, LossCount]:
        """Count a generation that ended while commands of these were out; how often that has happened."""
        async with self._database.transaction() as db:
            return await loss_counts.count_losses(db, in_flight, blamed)

    async def given_up(self) -> dict[str, str]:
        """Read which unfinished requests the operator wants failed, by id, and why."""
        async with self._database.reading() as db:
            return await rows.given_up(db)

    async def stored(self, request_ids: Collection[str] | None) -> None:
        """Return when these requests, or all that have outcomes (None), have them durably."""
        request_ids = list(self._outcomes) if request_ids is None else request_ids
        waiting = [self._waiting[id].outcome for id in request_ids if id in self._waiting]
        if waiting:
            await asyncio.wait(waiting)

    async def payload(self, request: Request) -> bytes:
        """Read the body as submitted: protobuf for forward_backward and forward, else JSON."""
        body = self._payloads.get(request.id)
        return await self._stored.payload(request) if body is None else body

    def body_at_hand(self, request: Request) -> bytes | None:
        """Return the body of a request, if that takes no time."""
        return self._payloads.get(request.id)

    def resolve(self, request_id: str, outcome: Outcome) -> None:
        """Set the outcome of a request. The first one counts; callers get it when it is durable."""
        if request_id in self._waiting and request_id not in self._outcomes:
            self._outcomes[request_id] = self.rollouts.noted(self._waiting[request_id].request, outcome)
            self._wake()

    def has_at_hand(self, request_id: str) -> bool:
        """Whether ``wait`` and ``session_of`` will return at once."""
        return request_id in self._results and request_id in self._sessions

    async def wait(self, request_id: str, timeout: float) -> Outcome | None:
        """Return the outcome as soon as it is durable, or None after ``timeout`` seconds."""
        waiting = self._waiting.get(request_id)
        if waiting is not None:
            done, _ = await asyncio.wait([waiting.outcome], timeout=timeout)
            return waiting.outcome.result() if done else None
        return self._results.get(request_id) or await read_before_deadline(
            timeout, partial(self._stored.outcome, request_id)
        )

    async def settled(self, request_id: str, timeout: float) -> bool:
        """Wait until an outcome that is set, if any, is durable; False after ``timeout`` seconds."""
        return request_id not in self._outcomes or await self.wait(request_id, timeout) is not None

    def let_go(self, request_ids: Iterable[str]) -> None:
        """Drop results that clients have received from memory. They can still be read."""
        for request_id in request_ids:
            self._results.drop(request_id)

    async def session_of(self, request_id: str, timeout: float) -> str | None:
        """The session of a request; None when it could not be read in ``timeout`` seconds."""
        waiting = self._waiting.get(request_id)
        if waiting is not None:
            return waiting.request.session_id
        known = self._sessions.get(request_id)
        return known or await read_before_deadline(timeout, partial(self._stored.session, request_id))

    async def run(self, announce: Callable[[Request], None]) -> None:
        """Write groups for ever. While nothing can be stored, outcomes wait and submissions are refused.

        ``announce`` is called once for each new request, when it is durable.
        """
        self._on_arrival = announce
        while True:
            await self._work.wait()
            await _gather()
            self._work.clear()
            submissions, self._submissions = self._submissions, []
            await self._store(submissions, list(self._outcomes))
            if not self._submissions and not self._outcomes:
                self._idle.set()

    async def _store(self, submissions: Sequence[Submission], ended: Sequence[str]) -> None:
        """Write a group. Bisects it to find and leave out only what cannot be written."""
        try:
            await self._write(submissions, [id for id in ended if id in self._outcomes])
        except BaseException as error:
            let_pass(error)
            if _is_outage(error):
                pause = self._storage.failed(error)
                for submission in submissions:
                    refuse(submission, Unavailable("cannot store the request now; send it again"))
                await asyncio.sleep(pause)
                self._wake()
            elif len(submissions) + len(ended) > 1:
                await self._store(submissions[: len(submissions) // 2], ended[: (len(ended) + 1) // 2])
                await self._store(submissions[len(submissions) // 2 :], ended[(len(ended) + 1) // 2 :])
            elif submissions:
                (guilty,) = submissions
                text = report(error, f"storing a {guilty.kind} request of {guilty.line}")
                refuse(guilty, Abandoned(text))
            else:
                await self._replace(ended[0], error)
        else:
            self._storage.succeeded()

    async def _replace(self, request_id: str, error: BaseException) -> None:
        """Store a failure in place of an outcome that cannot be stored."""
        outcome, request = self._outcomes[request_id], self._waiting[request_id].request
        was_executed = isinstance(outcome, Finished) or outcome.executed
        work = f"storing the outcome of {request}"
        self._outcomes[request_id] = failure(error, work, executed=was_executed, layout=outcome.layout)
        try:
            await self._write([], [request_id])
        except BaseException as again:
            let_pass(again)
            if _is_outage(again):
                self._wake()
                return
            report(again, f"{work}, though only that it failed,")
            self._release([self._ending(request_id)])  # the next start will run it again

    async def flush(self) -> None:
        """Return when everything that was submitted or resolved so far is durable."""
        await self._idle.wait()

    def close(self) -> None:
        """Unlock the files. ``run`` must have ended."""
        self._groups.files.close()

    def files_to_be(self) -> set[int]:
        """Numbers of files to which rows will refer once they can be written."""
        return self._groups.files_to_be()

    async def _write(self, submissions: Sequence[Submission], ended: Sequence[str]) -> None:
        """Make a group durable, then announce requests and wake waiting callers."""
        endings = [self._ending(request_id) for request_id in ended]
        written = await self._groups.write(submissions, endings)
        unannounced = [each for each in written.unfinished if each.id not in self._waiting]
        self._release(endings)
        for request in unannounced:  # stored by a commit that seemed to fail; their clients send them again
            self._announce(request)
        for request, submission in written.fresh:
            if submission.refused is None:
                self._payloads.put(request.id, submission.payload, len(submission.payload))
                metrics.IMAGES.inc(len(submission.images))
                self._announce(request, submission)
        for submission in submissions:
            answer(submission, written.known[submission.key])

    def _ending(self, request_id: str) -> NewOutcome:
        waiting, number = self._waiting[request_id], self.completions.next_number()
        return NewOutcome(waiting.request, self._outcomes[request_id], waiting.times, number)

    def _announce(self, request: Request, submission: Submission | None = None) -> None:
        waiting = self._waiting[request.id] = _Waiting(request)
        if submission is not None:
            waiting.times = RequestTimes(submission.accepted_at, trace=submission.trace)
        if _is_sample(waiting):
            self.samples.add(request, 0 if submission is None else submission.tokens)
        self._on_arrival(request)

    def _release(self, endings: Sequence[NewOutcome]) -> None:
        for request, outcome, times, completion, _ in endings:
            del self._outcomes[request.id]
            size = len(outcome.body) if isinstance(outcome, Finished) else len(outcome.error)
            self._results.put(request.id, outcome, size)
            self._sessions.put(request.id, request.session_id, len(request.id) + len(request.session_id))
            waiting = self._waiting.pop(request.id)
            waiting.outcome.set_result(outcome)
            tokens = outcome.spent.tokens if isinstance(outcome, Finished) else None
            ended_at = completion / MICROSECONDS
            failed = outcome if isinstance(outcome, Failed) else None
            timed = Timed(request, times, ended_at, tokens, failed)
            self.recent.ended(timed)
            if isinstance(outcome, Finished) and outcome.metrics:
                self.news.add(request.line)
            outcome_metrics.count(request.kind, outcome, ended_at - times.accepted_at)
            self._on_end(timed, failed)
            if _is_sample(waiting):
                self.samples.remove(request)
                ended = Completion(completion, request.id, failed is not None, size)
                self.completions.announce(request.line, request.seq_id, ended)

    def _wake(self) -> None:
        self._idle.clear()
        self._work.set()


async def open_queue(
    database: Database,
    data_dir: Path,
    storage: DiskGuard | None = None,
    on_end: OnRequestEnd = lambda ended, failed: None,
) -> RequestQueue:
    """Continue the log of earlier runs."""
    storage = storage or DiskGuard(data_dir)
    files = await asyncio.to_thread(PayloadFiles, data_dir / "payloads")
    async with database.reading() as db:
        unfinished = await db.run_sync(rows.unfinished)
        next_number = await rows.next_number(db)
        last_completion = await rows.last_completion(db)
    groups = GroupWriter(database, files, NoteWriter(data_dir), next_number)

    async def read(target: SamplerClient, span: CompletionRange) -> list[Completion]:
        async with database.reading() as db:
            return await rows.completions(db, target, span)

    completions = Completions(last_completion, read)
    return RequestQueue(database, storage, groups, completions, unfinished, on_end)


async def _gather() -> None:
    """Give the loop a few rounds. They cost nothing while it is idle; while it is busy, the group grows."""
    latest = time.monotonic() + GATHER_SECONDS
    for _ in range(GATHER_ROUNDS):
        await asyncio.sleep(0)
        if time.monotonic() > latest:
            break


def _is_outage(error: BaseException) -> bool:
    """Whether an error has nothing to do with what is written, as is true of all disk errors."""
    return isinstance(error, OSError) or is_outage(error)


def _is_sample(waiting: _Waiting) -> bool:
    return waiting.request.kind == "sample"
