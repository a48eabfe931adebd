"""The loop: requests come in, their lines move on, commands go out, outcomes are stored. Woken by events."""

import asyncio
import shutil
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from spmd_tx.coordinator.dispatcher import Dispatcher, Sampling, Workers
from spmd_tx.coordinator.lines import Line
from spmd_tx.coordinator.request_queue import Failed, Outcome, Request, RequestLog
from spmd_tx.coordinator.schemas import SampleRequest
from spmd_tx.coordinator.trained_model import TrainedModel
from spmd_tx.coordinator.training import Begun, Training, read_body
from spmd_tx.coordinator.versions import Versions
from spmd_tx.errors import InvalidRequest, MeshError, RequestError

STORAGE_ERRORS = (OSError, SQLAlchemyError)

Result = TypeVar("Result")


@dataclass(frozen=True)
class QueueStatus:
    """What a client is told about a request that is not finished."""

    queue_state: Literal["active", "paused_capacity"]
    reason: str | None


@dataclass(eq=False)
class _ModelLine:
    """A model, the requests for it, and the task that carries them out."""

    line: Line
    model: TrainedModel
    released: asyncio.Queue[Request] = field(default_factory=asyncio.Queue)  # their turn has come
    task: asyncio.Task[None] | None = None


class Scheduler:
    """Takes requests from the moment it is made; they are carried out while ``run`` runs.

    All of it runs in one asyncio loop. Requests of one model begin one after the other; their commands
    are in flight together, because workers keep the order.
    """

    def __init__(
        self,
        log: RequestLog,
        workers: Workers,
        training: Training,
        versions: Versions,
        clock: Callable[[], float],
    ) -> None:
        self._log = log
        self._workers = workers
        self._training = training
        self._versions = versions
        self._clock = clock
        self._work = asyncio.Event()
        self._alarm: asyncio.TimerHandle | None = None
        self._arrivals: list[Request] = []
        self._unfinished: dict[str, Request] = {}
        self._by_session: dict[str, set[str]] = {}  # unfinished requests
        self._ended: set[str] = set()  # sessions
        self._lines: dict[str, _ModelLine] = {}  # by model
        self._tasks: set[asyncio.Task[None]] = set()
        self._bug: BaseException | None = None
        self._sampling: Sampling | None = None
        self._dispatcher: Dispatcher | None = None
        log.on_arrival = self.arrive

    def arrive(self, request: Request) -> None:
        self._unfinished[request.id] = request
        self._by_session.setdefault(request.session_id, set()).add(request.id)
        self._arrivals.append(request)
        self._work.set()

    def consume(self, model_id: str, seq_id: int) -> None:
        """A request with this number was refused before it got into the log."""
        if model_id in self._lines:
            self._lines[model_id].line.consume(seq_id)
            self._work.set()

    def cancel(self, request_id: str) -> None:
        """Nobody waits for this sample any more. Other requests cannot be cancelled."""
        request = self._unfinished.get(request_id)
        if request is not None and request.kind == "sample":
            if self._sampling is not None:
                self._sampling.cancel(request_id)
            self._finish(request_id, Failed("the sample was cancelled by its client", "user"))

    def session_ended(self, session_id: str) -> None:
        """Free what the session holds, as soon as the work that it has given is done."""
        self._ended.add(session_id)
        if session_id not in self._by_session:
            self._free(session_id)

    def status(self, request_id: str) -> QueueStatus:
        request = self._unfinished.get(request_id)
        if request is None:
            return QueueStatus("active", None)
        if request.kind != "sample":
            reasons = [self._workers.busy, self._what_is_ahead(request)]
            return QueueStatus("active", "; ".join(filter(None, reasons)) or None)
        obstacle = None if self._sampling is None else self._sampling.status(request_id)
        reasons = [self._workers.busy, obstacle]
        state = "active" if obstacle is None else "paused_capacity"
        return QueueStatus(state, "; ".join(filter(None, reasons)) or None)

    async def run(self, sampling: Sampling) -> NoReturn:
        """Carry out requests until the workers are lost; then everything unfinished fails."""
        self._sampling = sampling
        self._dispatcher = Dispatcher(
            self._workers, sampling, self._training.grid.data_shards, self._work.set
        )
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                self._advance(self._dispatcher)
        except MeshError as error:
            for request_id in self._unfinished:
                self._log.resolve(request_id, Failed(str(error), "server"))
            raise
        finally:
            self._stop()

    def _advance(self, dispatcher: Dispatcher) -> None:
        """Do all that can be done now."""
        if self._bug is not None:
            raise self._bug
        for request_id, outcome in dispatcher.absorb():
            self._finish(request_id, outcome)
        arrivals, self._arrivals = self._arrivals, []
        for request in arrivals:
            self._take_in(request)
        self._release()
        dispatcher.dispatch([entry.model for entry in self._lines.values()])

    def _take_in(self, request: Request) -> None:
        if request.kind == "sample":
            self._spawn(self._admit(request))
            return
        try:
            self._line_of(request).line.arrive(request, self._clock())
        except RequestError as error:
            self._finish(request.id, Failed(str(error), "user"))

    def _line_of(self, request: Request) -> _ModelLine:
        entry = self._lines.get(request.line)
        if entry is None and request.seq_id != 0:
            raise InvalidRequest(
                f"{request.line} is not on this server any more, its session has ended; "
                "create a new client, from a saved checkpoint if there is one"
            )
        if entry is None:
            model = TrainedModel(request.line, request.session_id, on_step=self._work.set)
            entry = self._lines[request.line] = _ModelLine(Line(request.line), model)
            entry.task = self._spawn(self._carry_out(entry))
        return entry

    def _release(self) -> None:
        """Move all lines on, and set the alarm for the first gap that may have to be closed."""
        now = self._clock()
        for entry in self._lines.values():
            for request in entry.line.release(now):
                entry.released.put_nowait(request)
        if self._alarm is not None:
            self._alarm.cancel()
        wake_at = min(filter(None, (entry.line.wake_at() for entry in self._lines.values())), default=None)
        if wake_at is not None:
            loop = asyncio.get_running_loop()
            self._alarm = loop.call_later(max(0.0, wake_at - now), self._work.set)

    async def _carry_out(self, entry: _ModelLine) -> None:
        """Begin the requests of a model, one after the other."""
        while True:
            request = await entry.released.get()
            await entry.model.room()
            begun = await self._attempt(request, self._begin(entry.model, request))
            if begun is not None:
                settling = self._spawn(self._settle(request, begun))
                if begun.next_waits:
                    await settling

    async def _begin(self, model: TrainedModel, request: Request) -> Begun:
        try:
            return await self._training.begin(model, request, await self._log.payload(request))
        except (RequestError, *STORAGE_ERRORS) as error:
            if request.seq_id == 0:
                model.refusal = f"{model.id} was not created: {error}"
            raise

    async def _settle(self, request: Request, begun: Begun) -> None:
        settled = await self._attempt(request, begun.outcome())
        if settled is not None:
            self._finish(request.id, settled)

    async def _admit(self, request: Request) -> None:
        """Let a sample join the batch."""
        body = await self._attempt(request, self._log.payload(request))
        version = await self._attempt(request, self._versions.of(request.line))
        if request.id in self._unfinished and body is not None and version is not None:
            assert self._sampling is not None
            self._sampling.admit(request.id, read_body(body, SampleRequest), version)
            self._work.set()

    async def _attempt(self, request: Request, work: Coroutine[Any, Any, Result]) -> Result | None:
        """Do a part of a request; None when the request has failed because of it."""
        try:
            return await work
        except RequestError as error:
            self._finish(request.id, Failed(str(error), "user"))
        except STORAGE_ERRORS as error:
            self._finish(request.id, Failed(f"the server cannot read or write its data: {error}", "server"))
        return None

    def _finish(self, request_id: str, outcome: Outcome) -> None:
        request = self._unfinished.pop(request_id, None)
        if request is None:
            return
        self._log.resolve(request_id, outcome)
        siblings = self._by_session[request.session_id]
        siblings.discard(request_id)
        if not siblings:
            del self._by_session[request.session_id]
            if request.session_id in self._ended:
                self._free(request.session_id)

    def _free(self, session_id: str) -> None:
        """Give back the slots and versions of a session that has no work left."""
        for model_id, entry in list(self._lines.items()):
            if entry.model.session_id == session_id:
                del self._lines[model_id]
                self._training.free(entry.model)
                if entry.task is not None:
                    entry.task.cancel()
        folders = self._versions.end_session(session_id)
        if folders:
            self._spawn(self._delete(folders))

    async def _delete(self, folders: list[Path]) -> None:
        """Delete what commands that are in flight may still read."""
        last_reply = self._dispatcher and self._dispatcher.last_reply
        if last_reply is not None:
            await asyncio.wait([last_reply])
        for folder in folders:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _what_is_ahead(self, request: Request) -> str | None:
        entry = self._lines.get(request.line)
        missing = entry.line.missing if entry is not None else None
        if missing is not None and missing < request.seq_id:
            return f"waiting for request {missing} of this model, which has not arrived"
        ahead = sum(
            other.line == request.line and other.seq_id < request.seq_id
            for other in self._unfinished.values()
        )
        return f"behind {ahead} earlier requests of this model" if ahead else None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)
        return task

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._bug = task.exception()
            self._work.set()

    def _stop(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        for task in self._tasks:
            task.cancel()
