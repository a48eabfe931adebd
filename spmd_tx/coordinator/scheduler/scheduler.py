"""Holds what outlives the workers: the unfinished requests, and the verdict on the loss of a generation.

One asyncio loop. The log is the truth: each generation starts from what is in it (recovery/plan.py), so
that a lost worker and a restart of this process are handled alike.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from spmd_tx.coordinator.catalog.catalog import Catalog
from spmd_tx.coordinator.checkpoints.snapshots import Snapshots
from spmd_tx.coordinator.mesh.hub import Hub
from spmd_tx.coordinator.recovery.plan import plan, refused
from spmd_tx.coordinator.requests.failures import failure
from spmd_tx.coordinator.requests.quarantine import Quarantine
from spmd_tx.coordinator.requests.queue import RequestQueue
from spmd_tx.coordinator.requests.records import Failed, QueueStatus, Request, by_operator
from spmd_tx.coordinator.runtime.containment import report
from spmd_tx.coordinator.sampling.job import SampleJob
from spmd_tx.coordinator.scheduler.execution import Execution
from spmd_tx.coordinator.scheduler.generation import GenerationEnd, GenerationParts
from spmd_tx.coordinator.scheduler.request_table import RequestState, RequestTable
from spmd_tx.coordinator.scheduler.sample_offer import SampleOffer
from spmd_tx.coordinator.scheduler.siblings import Siblings
from spmd_tx.coordinator.storage.outages import is_outage, retry_through_outages
from spmd_tx.coordinator.storage.tables import ModelRow
from spmd_tx.coordinator.training import custom_loss_catalog
from spmd_tx.coordinator.training.line import Restoration
from spmd_tx.errors import MeshError
from spmd_tx.protocol.memory_plan import MemoryPlan

logger = logging.getLogger(__name__)

MOST_LOSSES_BY_COMMAND = 2  # generations that a command may end before its request is given up
HAVE_NUMBERS = ("forward_backward", "optim_step")  # kinds whose results depend on every bit of the base
MOST_LOSSES = 20  # generations that may end for other reasons while a request's commands are out


@dataclass(frozen=True)
class ScheduledGroup:
    """Says which work of the log is a group's, and what its workers do; by default all work is."""

    takes: Callable[[Request], bool] = lambda request: True
    trains: Callable[[ModelRow], bool] = lambda model: True
    phase: Callable[[], str | None] = lambda: None  # what happens while no generation runs
    siblings: Siblings = field(default_factory=Siblings)  # of the groups of the same base model


@dataclass(eq=False)
class Scheduler:
    """Takes requests from its creation on, and carries them out while ``run`` runs."""

    log: RequestQueue
    models: Catalog
    snapshots: Snapshots
    make_parts: Callable[[Hub, MemoryPlan], GenerationParts]
    clock: Callable[[], float]
    quarantine: Quarantine = field(default_factory=Quarantine)
    group: ScheduledGroup = field(default_factory=ScheduledGroup)
    _execution: Execution | None = None
    _remains: GenerationEnd = field(default_factory=GenerationEnd)  # of the last one
    _judging: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        own = [each for each in self.log.unfinished() if self.group.takes(each)]
        unfinished = [each for each in own if not self._is_settled(each)]
        self._table = RequestTable(self.quarantine, unfinished)
        self._beyond_repair = self.quarantine.beyond_repair()  # requests that cannot be run again, and why
        self.group.siblings.join(self._table, self._free)

    def holds(self, request_id: str) -> bool:
        """Whether a request is unfinished here."""
        return self._table.find_unfinished(request_id) is not None

    @property
    def has_unfinished(self) -> bool:
        """Whether there is work that can be finished."""
        if self._execution is not None:
            return self._execution.has_unfinished
        return self._table.has_unfinished

    def arrive(self, request: Request, tokens: int = 0) -> None:
        """Take a new request, which is in the log; ``tokens`` are those that a sample takes at most."""
        if not self._is_settled(request):
            self.take_over(request, None, tokens)

    # --- samples among the groups of a base model -------------------------------------------------------

    @property
    def waiting_tokens(self) -> int:
        """How many tokens unfinished samples take at most."""
        return self._table.sample_tokens

    @property
    def has_samples(self) -> bool:
        return bool(self.samples())

    def draws_from(self, sampler_id: str) -> bool:
        """Whether a sample of a sampler is unfinished here."""
        return bool(self._table.unfinished_of_line(sampler_id))

    def samples(self) -> list[Request]:
        """List the unfinished samples, in the order of their arrival."""
        return [request for request in self._table.unfinished() if request.kind == "sample"]

    def movable(self) -> list[Request]:
        """List the samples that may go on with other workers.

        Without workers these are all, but for those that may have ended them; else those that have not begun.
        """
        states = [state for each in self.samples() if (state := self._table.get(each.id)) is not None]
        safe = [each.request for each in states if not each.dangers]
        if self._execution is not None:
            return [request for request in safe if self._execution.sampling.may_withdraw(request.id)]
        return [request for request in safe if request.id not in self._remains.blamed]

    def hand_over(self, request: Request) -> SampleJob | None:
        """Let go of a sample that ``movable`` lists, or without workers any; return what is known."""
        state = self._table.find_unfinished(request.id)
        if state is None:
            return None
        job, state.job = state.job, None
        if self._execution is not None:
            job = self._execution.sampling.withdraw(request.id) or job
        self._table.remove(request.id)
        return job

    def take_over(
        self, request: Request, job: SampleJob | None, tokens: int = 0, *, is_suspect: bool = False
    ) -> None:
        """Carry out a request, from where others have left it."""
        self._table.add(request, job=job, tokens=tokens)
        if is_suspect:
            self._table.suspect([request.id])
        if self._execution is not None:
            self._execution.arrive(request)

    def offer(self, request: Request, prompt: Sequence[int]) -> SampleOffer:
        """Say what to expect of a sample here; ``prompt`` is what the prefix cache may lack of it."""
        state = self._table.get(request.id)
        waiting = self._table.sample_tokens - (0 if state is None else state.tokens)
        if self._execution is None:
            return SampleOffer(waiting, len(prompt))
        return self._execution.offer(request, prompt, waiting)

    async def judge(self) -> None:
        """Count the loss of the last workers for those that were under way, unless that was done."""
        await retry_through_outages(self._judge)

    def consume(self, model_id: str, seq_id: int) -> None:
        """Note that a request with this number was refused before it got into the log."""
        if self._execution is not None:
            self._execution.consume(model_id, seq_id)

    def cancel(self, request_id: str) -> None:
        """End a sample that nobody waits for any more. Other requests cannot be cancelled."""
        state = self._table.find_unfinished(request_id)
        if state is None or state.request.kind != "sample":
            return
        cancelled = Failed("the sample was cancelled by its client", "user")
        if self._execution is not None:
            self._execution.cancel(state.request, cancelled)
        else:
            self._fail(state, cancelled)

    def give_up(self, request_id: str, why: str) -> bool:
        """Fail a request on behalf of the operator; False when it is too late.

        Commands of a request that changes a model may be out; then its result stands, if it comes, and it
        is not begun a second time.
        """
        state = self._table.find_unfinished(request_id)
        if state is None:
            return True
        request, failed = state.request, Failed(by_operator(why), "server")
        if self._execution is None:
            self._table.give_up(state, failed.error)  # it may be in the line of a model that is being planned
            self.log.resolve(request_id, failed)
        elif not self._execution.give_up(state, failed):
            return False
        logger.warning("%s is %s", request, failed.error)
        return True

    def session_ended(self, session_id: str) -> None:
        """Free what the session holds as soon as its work is done."""
        self._table.end_session(session_id)
        if self._execution is not None:
            self.group.siblings.free(session_id)

    def retire(self, samplers: Collection[str]) -> None:
        """Give up the versions of samplers that were not used for long; without workers, do so later."""
        if self._execution is not None:
            self._execution.retire(samplers)

    def status(self, request_id: str) -> QueueStatus:
        if self._execution is not None:
            return self._execution.status(request_id)
        if self._table.find_unfinished(request_id) is None:
            return QueueStatus("active", None)
        return QueueStatus("paused_capacity", self.group.phase())

    async def drain(self) -> None:
        """Take snapshots, so that the next start has little to run again."""
        if self._execution is not None:
            await self._execution.keeper.take_all(list(self._execution.lines.values()))

    async def steps_to_run_again(self) -> int:
        """Count the training requests behind the newest snapshots, which ``run`` will run again."""
        restorations = await retry_through_outages(self._plan)
        again = (known for restoration in restorations for known in restoration.again.values())
        return sum(known.request.kind in HAVE_NUMBERS for known in again)

    async def run(self, workers: Hub, plan: MemoryPlan) -> NoReturn:
        """Carry out requests with workers that hold nothing yet, until they are lost: a MeshError."""
        await retry_through_outages(self._fail_those_given_up)
        await retry_through_outages(self._judge)
        parts = self.make_parts(workers, plan)
        restorations = await retry_through_outages(self._plan if parts.trains else self._leave_models)
        self._table.start_generation(
            [known.request for restoration in restorations for known in restoration.again.values()]
        )
        self._execution = Execution(
            self.log, self.snapshots, parts, self._table, self.clock, self.group.siblings
        )
        try:
            await self._execution.run(restorations)
        except (MeshError, asyncio.CancelledError):  # the latter when no command was out that could fail
            self._remains = self._execution.remains
            raise
        finally:
            self._execution = None
            self._table.end_generation()

    def _free(self, session_id: str) -> None:
        """Give back what a session holds that is over."""
        if self._execution is not None:
            self._execution.free(session_id)

    def _is_settled(self, request: Request) -> bool:
        """Whether nothing is left to do: a custom loss is written down, or a request must not begin again."""
        verdict = self.quarantine.verdict(request.id)
        if verdict is not None:
            logger.error("%s: %s", request, verdict.error)
            self.log.resolve(request.id, verdict)
            return True
        if request.kind != custom_loss_catalog.KIND:
            return False
        try:
            outcome = custom_loss_catalog.created(request)
        except BaseException as error:
            outcome = failure(error, str(request))
        self.log.resolve(request.id, outcome)
        return True

    async def _fail_those_given_up(self) -> None:
        """Fail what the operator has given up, before anything begins with these workers."""
        given_up = await self.log.given_up()
        own = {request_id: why for request_id, why in given_up.items() if self.holds(request_id)}
        for request_id, why in own.items():
            self.give_up(request_id, why)
        await self.log.stored(own)

    async def _judge(self) -> None:
        """Give up requests that keep ending generations, and treat those that may do so as suspects.

        Only a request that was alone on the device is given up for what its command did.
        """
        async with self._judging:  # a group whose workers stay away is judged while it waits for them
            await self.log.stored(None)
            remains = in_flight, blamed = self._remains
            self._table.suspect(blamed)
            if in_flight:
                counted = await self.log.count_losses(in_flight, blamed)
                for request_id, losses in counted.items():
                    is_guilty = losses.by_command >= MOST_LOSSES_BY_COMMAND and blamed == {request_id}
                    if is_guilty or losses.total >= MOST_LOSSES:
                        await self._give_up(request_id, losses.by_command if is_guilty else losses.total)
            if self._remains is remains:  # counted; before that, an outage has it done again
                self._remains = GenerationEnd()

    async def _give_up(self, request_id: str, times: int) -> None:
        state = self._table.find_unfinished(request_id)
        if state is not None:
            message = (
                f"the workers were lost {times} times while this request was carried out; it is given up"
            )
            request = state.request
            logger.error("%s: %s", request, message)
            self._fail(state, Failed(message, "server"))
            await self.log.stored([request_id])
            return
        self._beyond_repair[request_id] = (
            f"the model cannot be restored: the workers were lost {times} times while request {request_id} "
            "was run again"
        )

    def _fail(self, state: RequestState, failed: Failed) -> None:
        """End a request while there are no workers."""
        self._table.remove(state.request.id)
        self.log.resolve(state.request.id, failed)

    async def _plan(self) -> list[Restoration]:
        """Plan the models whose sessions are open or have work left, also samples of their versions."""
        restorations = []
        for model in await self.models.open_models(self.group.siblings.sessions_at_work):
            if not self.group.trains(model):
                continue
            restoration = await self._restoration(model)
            if restoration is not None:
                restorations.append(restoration)
            if self.models.has_ended(model.session_id):
                self._table.end_session(model.session_id)
        return restorations

    async def _leave_models(self) -> list[Restoration]:
        """Restore none: these workers train no models."""
        for model in await self.models.open_models(self._table.sessions_at_work):
            if self.models.has_ended(model.session_id):
                self._table.end_session(model.session_id)
        return []

    async def _restoration(self, model: ModelRow) -> Restoration | None:
        """Plan one model; one that cannot be planned cannot be used."""
        unfinished = self._table.unfinished_of_line(model.id)
        try:
            return await plan(
                model.id, model.session_id, unfinished, self._beyond_repair, self.log, self.snapshots
            )
        except BaseException as error:
            if is_outage(error):
                raise
            refusal = f"{model.id} cannot be restored: {report(error, f'restoring {model.id}')}"
            history = await self.log.history(model.id, after=-1)
            first_open = min((request.seq_id for request in unfinished), default=None)
            return refused(model.id, model.session_id, refusal, first_open, history)
