"""Carries out requests on one generation of workers: moves lines on, sends commands, stores outcomes."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from spmd_tx.coordinator.checkpoints.snapshots import Snapshots
from spmd_tx.coordinator.recovery.replay import Replay
from spmd_tx.coordinator.requests import records
from spmd_tx.coordinator.requests.failures import failed_by
from spmd_tx.coordinator.requests.queue import RequestQueue
from spmd_tx.coordinator.requests.records import CHANGES_STATE, CHUNKED_KINDS, Failed, Outcome, Request
from spmd_tx.coordinator.runtime.containment import let_pass, report
from spmd_tx.coordinator.scheduler.dispatcher import Dispatcher
from spmd_tx.coordinator.scheduler.generation import GenerationEnd, GenerationParts
from spmd_tx.coordinator.scheduler.planning_faults import PlanningFaults
from spmd_tx.coordinator.scheduler.queue_status import QueueView
from spmd_tx.coordinator.scheduler.request_table import RequestState, RequestStatus, RequestTable
from spmd_tx.coordinator.scheduler.sample_gate import SampleGate
from spmd_tx.coordinator.scheduler.sample_offer import FIRST_SPEED, SampleOffer
from spmd_tx.coordinator.scheduler.siblings import Siblings
from spmd_tx.coordinator.scheduler.snapshotting import SnapshotKeeper
from spmd_tx.coordinator.scheduler.tasks import Tasks, uninterrupted
from spmd_tx.coordinator.scheduler.weight_supply import WeightSupply
from spmd_tx.coordinator.storage.outages import is_outage, retry_through_outages
from spmd_tx.coordinator.training.line import ModelLine, Restoration, WaitingLines
from spmd_tx.coordinator.training.model import HALF_DONE
from spmd_tx.coordinator.training.outcomes import Begun
from spmd_tx.errors import DamagedBody, InvalidRequest, MeshError, NotSent, RequestError, ServerFault

STORAGE_ERRORS = (OSError, SQLAlchemyError, DamagedBody)

Result = TypeVar("Result")


@dataclass(eq=False)
class Execution:
    """Begins the requests of a model one after the other, while their commands are in flight together.

    Workers keep the order. A restored model's line starts with the requests that have to be run again.
    """

    log: RequestQueue
    snapshots: Snapshots
    parts: GenerationParts
    table: RequestTable
    clock: Callable[[], float]
    siblings: Siblings
    lines: dict[str, ModelLine] = field(default_factory=dict)  # by model
    remains: GenerationEnd = field(default_factory=GenerationEnd)
    _waiting: WaitingLines = field(default_factory=WaitingLines)
    _ready: dict[str, None] = field(default_factory=dict)  # models with steps that may be sent
    _work: asyncio.Event = field(default_factory=asyncio.Event)
    _alarm: asyncio.TimerHandle | None = None
    _arrivals: list[Request] = field(default_factory=list)
    _loss: MeshError | None = None

    def __post_init__(self) -> None:
        log, parts, table = self.log, self.parts, self.table
        self._training, self._versions, self.sampling = parts.training, parts.versions, parts.sampling
        self._wake = self._work.set
        self._tasks = tasks = Tasks(self._wake)
        self._dispatcher = Dispatcher(parts, table, log, self._wake)
        self._supply = supply = WeightSupply(parts, self.lines, self._dispatcher, self._wake)
        self._gate = SampleGate(log, parts, table, supply.restored, self._attempt, tasks, self._wake)
        self.keeper = SnapshotKeeper(log, self.snapshots, parts, table, tasks, self._is_lost, self._wake)
        self._faults = PlanningFaults(self._dispatcher, table, self.lines, self._resolve, self._wake)
        self._replay = Replay(log, self._training, tasks.spawn, self._work_on, table.remove)
        self._view = QueueView(parts, table, self.lines, self._dispatcher.seconds, supply.unsaved)

    @property
    def has_unfinished(self) -> bool:
        """Whether there are unfinished requests that these workers can carry out."""
        if self.parts.trains:
            return self.table.has_unfinished
        samples = (request for request in self.table.unfinished() if request.kind == "sample")
        return any(sample.line not in self._supply.unsaved for sample in samples)

    def arrive(self, request: Request) -> None:
        self._arrivals.append(request)
        self._wake()

    def consume(self, model_id: str, seq_id: int) -> None:
        entry = self.lines.get(model_id)
        if entry is not None:
            entry.line.consume(seq_id)
            self._waiting.add(entry)
            self._wake()

    def cancel(self, request: Request, cancelled: Failed) -> None:
        self.sampling.cancel(request.id)
        self._finish(request, cancelled)
        self._wake()  # others may have its rows and pages

    def give_up(self, state: RequestState, failed: Failed) -> bool:
        """Fail a request, unless it has begun and its commands may be out; samples change nothing."""
        request = state.request
        if request.kind == "sample":
            self.cancel(request, failed)
            return True
        if state.status is RequestStatus.WAITING:
            self.table.give_up(state, failed.error)
            self._answer(request, failed)
        elif request.kind in records.WITHDRAWABLE and self.lines[request.line].model.withdraw(request.id):
            self.lines[request.line].pass_over(request, failed.error)
            self._finish(request, failed)
        else:
            return False
        self._wake()  # what is behind it may be sent
        return True

    # --- samples that may go elsewhere ------------------------------------------------------------------

    def offer(self, request: Request, prompt: Sequence[int], waiting: int) -> SampleOffer:
        """Say what to expect of a sample, before which so many tokens are drawn."""
        version = self._versions.known(request.line)
        seconds, rows = self._dispatcher.seconds, self.sampling.rows
        step, read = seconds.of_token("decode"), seconds.of_token("prefill")
        cached = self.sampling.cached_tokens(version, request.session_id, prompt) if version else 0
        return SampleOffer(
            waiting=waiting,
            unread=len(prompt) - cached,
            draws=rows / step if step else FIRST_SPEED,
            reads=1 / read if read else FIRST_SPEED,
            must_load=version is None,
        )

    def status(self, request_id: str) -> records.QueueStatus:
        return self._view.status(request_id, self.parts.workers.busy)

    async def run(self, restorations: Collection[Restoration]) -> NoReturn:
        """Carry out requests until a MeshError: the workers are lost. All tasks have ended by then."""
        in_line = set[str]()
        for restoration in restorations:
            in_line.update(request.id for request in restoration.requests)
            self._add_line(restoration.model_id, restoration.session_id, restoration)
        for session_id in {restoration.session_id for restoration in restorations}:
            self.siblings.free(session_id)  # it may have ended after its models were planned
        self._arrivals = [request for request in self.table.unfinished() if request.id not in in_line]
        self._supply.join()
        try:
            while True:
                self._advance_or_fail()
                await self._work.wait()
                self._work.clear()
        except (MeshError, asyncio.CancelledError) as end:
            error = end if isinstance(end, MeshError) else MeshError("the workers were stopped")
            await uninterrupted(self._wind_down(error))
            raise
        finally:
            self._supply.leave()
            self._stop()

    def _advance_or_fail(self) -> None:
        """End the generation on an error that nobody foresaw; the next one finds out whose fault it is."""
        try:
            self._advance()
        except BaseException as error:
            what = "the workers are started again, with care for the requests that were under way"
            text = report(error, "driving the workers", what)
            raise ServerFault(text, bool(self._dispatcher.planned_for.requests)) from error

    def _advance(self) -> None:
        """Do all that can be done now."""
        self._tasks.raise_error()
        self._faults.contain(lambda: self._resolve(self._dispatcher.absorb()))
        self._discard(self._versions.bank.take_abandoned())
        arrivals, self._arrivals = self._arrivals, []
        for request in arrivals:
            self._take_in(request)
        self._gate.admit_those_who_may()
        self._release()
        ready = [self.lines[model_id].model for model_id in self._ready if model_id in self.lines]
        self._faults.contain(partial(self._dispatcher.dispatch, ready))
        self._ready = {model.id: None for model in ready if model.unsent}

    def _resolve(self, outcomes: Iterable[tuple[str, Outcome]]) -> None:
        for request_id, outcome in outcomes:
            state = self.table.find_unfinished(request_id)
            if state is not None:
                self._finish(state.request, outcome)

    def _take_in(self, request: Request) -> None:
        if request.kind == "sample":
            self._gate.arrive(request)
            return
        if not self.parts.trains:  # it waits in the table for workers that do
            return
        try:
            entry = self._line_of(request)
            entry.line.arrive(request, self.clock())
            self._waiting.add(entry)
        except BaseException as error:
            self._finish(request, failed_by(error, request))

    def _line_of(self, request: Request) -> ModelLine:
        entry = self.lines.get(request.line)
        if entry is None and request.seq_id != 0:
            raise InvalidRequest(
                f"{request.line} is no longer on this server, because its session has ended; "
                "create a new client, from a saved checkpoint if there is one"
            )
        return entry or self._add_line(request.line, request.session_id)

    def _add_line(self, model_id: str, session_id: str, restoration: Restoration | None = None) -> ModelLine:
        tenant = self._training.samplers.owner_of(session_id)
        restoration = restoration or Restoration(model_id, session_id)
        entry = self.lines[model_id] = ModelLine(restoration, tenant, partial(self._note_step, model_id))
        entry.task = self._tasks.spawn(self._carry_out(entry))
        return entry

    def _note_step(self, model_id: str) -> None:
        self._ready[model_id] = None
        self._wake()

    def _release(self) -> None:
        """Move lines on, and set the alarm for the first gap that may have to be closed."""
        now = self.clock()
        wake_at = self._waiting.release(now)
        if self._alarm is not None:
            self._alarm.cancel()
        if wake_at is not None:
            self._alarm = asyncio.get_running_loop().call_later(max(0.0, wake_at - now), self._work.set)

    async def _carry_out(self, entry: ModelLine) -> None:
        """Begin the requests of a model, one after the other."""
        if entry.start is not None:
            try:
                await self._training.restore(entry.model, entry.start)
            except MeshError:  # its session has ended, or the workers are lost
                return
            except BaseException as error:
                is_known = isinstance(error, (RequestError, NotSent))
                why = str(error) if is_known else report(error, "a restoration")
                entry.refuse(entry.model.refusal or f"{entry.model.id} cannot be restored: {why}")
        while (request := await entry.next()) is not None:
            await entry.model.room()
            if request.id in entry.again:
                await self._replay.run_again(entry, request)
                continue
            begun = await self._attempt(request, partial(self._begin, entry, request))
            if begun is not None:
                settling = self._tasks.spawn(self._settle(request, begun))
                if begun.next_waits:
                    await settling
                continue
            state = self.table.get(request.id)
            if state is not None and state.status is RequestStatus.GIVEN_UP:
                self.table.remove(request.id)
                entry.pass_over(request, state.given_up_because)

    async def _begin(self, entry: ModelLine, request: Request) -> Begun | None:
        """Begin a request; None if the operator has given it up meanwhile."""
        model, effects = entry.model, entry.model.effects
        self.log.note("began", [request.id])
        try:
            async with self._training.turn(request.kind):
                body = await self.log.payload(request)
                state = self.table.find_unfinished(request.id)
                if state is None:
                    return None
                state.status = RequestStatus.BEGUN
                begun = await self._training.begin(model, request, body)
        except BaseException as error:
            let_pass(error)
            if is_outage(error):  # it will be tried again
                raise
            is_known = isinstance(error, (RequestError, NotSent, *STORAGE_ERRORS))
            why = str(error) if is_known else "the server could not carry out the request"
            if not is_known and model.effects > effects and request.kind in CHANGES_STATE:
                entry.refuse(f"{model.id} cannot be used before the workers are started again: {HALF_DONE}")
            elif not is_known or request.seq_id == 0:
                entry.pass_over(request, why)
            raise
        entry.begun(request)
        if request.kind == "save_weights_for_sampler":
            self._tasks.spawn(self.keeper.note_answered(entry.model.id, request.seq_id))
        if request.kind == "optim_step":
            self.keeper.take_if_due(entry, request.seq_id)
        return begun

    async def _settle(self, request: Request, begun: Begun) -> None:
        settled = await self._attempt(request, begun.outcome, request.kind in CHANGES_STATE)
        if settled is not None:
            self._finish(request, settled)

    async def _attempt(
        self, request: Request, work: Callable[[], Awaitable[Result]], counts: bool = False
    ) -> Result | None:
        """Do a part of a request; None when the request has failed because of it, or the workers are lost.

        ``counts`` says that its commands are out, so that it has an effect whatever becomes of it.
        """
        layout = self._training.shapes.layout if counts and request.kind in CHUNKED_KINDS else None
        try:
            return await self._work_on(request, work)
        except MeshError:
            return None
        except BaseException as error:
            self._finish(request, failed_by(error, request, counts, layout))
            return None

    async def _work_on(self, request: Request, work: Callable[[], Awaitable[Result]]) -> Result:
        """Do a part of a request, again after each outage. Raises MeshError when the workers are lost."""
        return await retry_through_outages(lambda: self.table.mark(request.id, work), self._is_lost)

    def _finish(self, request: Request, outcome: Outcome) -> None:
        """End a request, unless it has ended."""
        state = self.table.find_unfinished(request.id)
        if state is not None:
            self.table.remove(request.id)
            self._answer(request, outcome)
            if state.dangers:
                self._wake()  # others waited for it
            if request.kind == "sample" and not self.table.sample_tokens:
                self.siblings.ran_dry()

    def _answer(self, request: Request, outcome: Outcome) -> None:
        self.log.resolve(request.id, outcome)
        self.siblings.free(request.session_id)

    def free(self, session_id: str) -> None:
        """Give back the slots and versions of a session that has no work left."""
        for model_id, entry in list(self.lines.items()):
            if entry.model.session_id == session_id:
                del self.lines[model_id]
                self._waiting.discard(entry)
                self._training.slots.free(entry.model)
                entry.lose(MeshError(f"session {session_id} has ended"))  # it may be run again just now
                if entry.task is not None:
                    entry.task.cancel()
        self.table.forget_session(session_id)
        self._discard(self._versions.end_session(session_id))
        self._wake()  # others may have its slots

    def retire(self, samplers: Collection[str]) -> None:
        """Give up the versions of samplers that nobody uses any more."""
        unused = [sampler for sampler in samplers if not self.table.unfinished_of_line(sampler)]
        self._discard(self._versions.retire(unused))

    def _discard(self, folders: list[Path]) -> None:
        if folders:
            self._versions.store.discard(folders)

    async def _wind_down(self, error: MeshError) -> None:
        """End all tasks without leaving anything half done, and say what remains."""
        self._loss, dispatcher = error, self._dispatcher
        self._supply.lose(error)
        suspects = dispatcher.planned_for.requests if isinstance(error, ServerFault) else set[str]()
        self.remains = GenerationEnd(dispatcher.in_flight | suspects, dispatcher.blamed | suspects)
        for request_id, job in self.sampling.unanswered().items():
            state = self.table.find_unfinished(request_id)
            if state is not None:
                state.job = job
        self._dispatcher.lose(error)
        self.snapshots.abandon(error)
        self._training.loss_runs.abandon(error)
        for entry in self.lines.values():
            entry.lose(error)
        self.keeper.abandon()
        await self._tasks.wait()

    def _is_lost(self) -> bool:
        return self._loss is not None

    def _stop(self) -> None:
        if self._alarm:
            self._alarm.cancel()
        self.keeper.abandon()
        self._tasks.cancel()
