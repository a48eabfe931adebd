"""Runs generations of workers: starts one, lets it work, finds out why it ended, and starts the next."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NoReturn

import msgspec

from spmd_tx.coordinator.mesh.hub import NO_COMMAND, Hub
from spmd_tx.coordinator.mesh.loss_causes import GenerationLoss, LossSign, Suspicion, cause, of_failure
from spmd_tx.coordinator.mesh.loss_signs import LossSigns
from spmd_tx.coordinator.mesh.roster import AgentRoster, HostDevices
from spmd_tx.coordinator.mesh.watchdog import Watchdog
from spmd_tx.coordinator.runtime import log_groups, metrics
from spmd_tx.errors import CrashLoop, MeshError, ServerFault, StartError, WorkerLost
from spmd_tx.protocol.agents import StartWorker
from spmd_tx.protocol.commands import Shutdown
from spmd_tx.protocol.reports import AnyReport, Failure, Ready
from spmd_tx.protocol.setup import Setup

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.5  # between checks for silent workers and agents
EXPLANATION_SECONDS = 1.0  # after the first sign of a loss, to wait for the one that explains it
STOP_SECONDS = 10.0  # for an agent to kill its worker
RELEASE_SECONDS = 30.0  # until the agents of a replica that is not complete look for another one

FIRST_DELAY, LONGEST_DELAY = 0.2, 30.0  # seconds before the next generation
MAX_FRUITLESS = 5  # generations in a row
FRUITFUL_SECONDS = 60.0  # a generation that was ready for so long was fruitful even without a command

# No crash loops: a lost host is waited for, and requests that make the coordinator fail are given up in turn.
NO_LOOPS = frozenset({Suspicion.HOST_GONE, Suspicion.FAULT})

# The work with workers that are ready. It ends with the MeshError of a command, or is cancelled.
GenerationWork = Callable[[Ready], Awaitable[object]]


@dataclass(frozen=True)
class GenerationPlan:
    """Holds what all generations have in common."""

    model_files: dict[str, str]
    command_timeout: float  # seconds
    next_number: Callable[[], Awaitable[int]]
    setup: Setup | None = None  # without generation and address; None: ``settle`` returns the whole plan
    devices: int | None = None  # of each process; None: likewise
    settle: Callable[[list[HostDevices]], Awaitable["GenerationPlan"]] | None = None
    find_files: Callable[[], dict[str, str]] | None = None  # what ``model_files`` were found with; blocks
    revision: str | None = None  # the model's commit on the Hugging Face Hub, where one was asked for


@dataclass
class Generations:
    """Runs the workers of one mesh. ``watch`` and ``run`` must run side by side; reports are handed over."""

    hub: Hub
    roster: AgentRoster
    signs: LossSigns
    plan: GenerationPlan
    may_be_killed: bool = False  # whether losses from outside never count as a crash loop: others do its work
    _watchdog: Watchdog | None = None
    _ready_at: float | None = None
    _has_been_ready: bool = False

    @property
    def is_ready(self) -> bool:
        """Whether the workers execute commands now."""
        return self._ready_at is not None

    def take(self, identity: bytes, report: AnyReport) -> None:
        """Process the report of a worker."""
        if self._watchdog is not None and self.hub.includes(report):
            self._watchdog.heard(report)
            if isinstance(report, Failure):
                story = report.message if report.is_consequence else report.traceback
                logger.error("worker %d failed:\n%s", report.process, story)
                self.signs.add(of_failure(report, self.roster.host(report.process)))
        try:
            self.hub.take(identity, report)
        except MeshError as error:
            self.signs.add(LossSign(Suspicion.FAILED, report.process, str(error), by_command=False))

    async def watch(self) -> NoReturn:
        """Notice silent workers and agents, and missed deadlines."""
        clock = asyncio.get_running_loop().time
        then = clock()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            seconds, then = clock() - then, clock()
            self.roster.passed(seconds)
            if self._watchdog is not None:
                for sign in self._watchdog.passed(seconds, self.hub.current(), self.hub.compiling()):
                    self.signs.add(self._with_hosts(sign))

    async def run(self, work: GenerationWork) -> NoReturn:
        """Run one generation after the other. Raises CrashLoop when too many in a row were fruitless."""
        fruitless = 0
        while True:
            loss, was_fruitful = await self._run_one(work)
            if not loss.cause.was_announced:
                metrics.UNANNOUNCED_LOSSES.labels(metrics.group()).inc()
            if was_fruitful:
                fruitless = 0
            elif loss.cause.suspicion not in NO_LOOPS and not self._was_expected(loss):
                fruitless += 1
            if fruitless == MAX_FRUITLESS:
                raise CrashLoop(
                    f"{MAX_FRUITLESS} generations of workers in a row have ended without finishing any "
                    f"command. The last one: {loss.story}. Unfinished requests are kept for the next start"
                )
            delay = min(FIRST_DELAY * 2**fruitless, LONGEST_DELAY)
            logger.error("%s; starting the workers again in %g s", loss.story, delay)
            await asyncio.sleep(delay)

    def _was_expected(self, loss: GenerationLoss) -> bool:
        is_from_outside = loss.cause.suspicion == Suspicion.KILLED and not loss.cause.by_command
        return self.may_be_killed and is_from_outside

    async def give_up(self, error: StartError | CrashLoop) -> None:
        """Kill what is left of the last generation, so that ``run`` may be called again later."""
        self.hub.lose(WorkerLost(str(error)), NO_COMMAND)
        await self.roster.stop(STOP_SECONDS)

    async def look_again(self) -> None:
        """Look at the files of the model again, before another try: they may have been repaired.

        Once workers were ready, they stay those that results were computed with. Raises StartError.
        """
        if self.plan.find_files is not None and not self._has_been_ready:
            files = await asyncio.to_thread(self.plan.find_files)
            self.plan = replace(self.plan, model_files=files)

    async def shut_down(self, patience: float) -> None:
        """Let workers end within ``patience`` seconds, kill the rest, then end the agents and ``run``."""
        self.signs.close()
        if self.is_ready and patience > 0:
            self.hub.send(Shutdown())
            await self.roster.ended(patience)
        await self.roster.stop(STOP_SECONDS)
        self.roster.quit()

    async def _run_one(self, work: GenerationWork) -> tuple[GenerationLoss, bool]:
        """Run a generation until its workers are gone: its loss, and whether it was fruitful."""
        number = await self.plan.next_number()
        metrics.GENERATION.labels(metrics.group()).set(number)
        metrics.GENERATIONS.labels(metrics.group()).inc()
        await self._wait_for_agents()
        if self.plan.setup is None:
            self.plan = await self._settle_plan(self.plan)
        self.signs.clear()
        self._begin(number)
        living = asyncio.create_task(self._live(work))
        noticing = asyncio.create_task(self.signs.any())
        try:
            await asyncio.wait([living, noticing], return_when=asyncio.FIRST_COMPLETED)
            if not self.signs.seen:
                self.signs.add(_of_work(living))
            await self._wait_for_explanation()
            was_fruitful = self._was_fruitful()
            loss = self._lose()
            await self.roster.stop(STOP_SECONDS)
            living.cancel()  # it notices the loss only by a command that fails
            await asyncio.wait([living])
            if not living.cancelled():
                _of_work(living)
            return loss, was_fruitful
        finally:
            self._watchdog = self._ready_at = None
            for task in (living, noticing):
                task.cancel()
            await asyncio.gather(living, noticing, return_exceptions=True)

    async def _settle_plan(self, plan: GenerationPlan) -> GenerationPlan:
        """Choose the mesh for the devices of all hosts."""
        assert plan.settle is not None, "nobody says how many devices each process has"
        self.hub.be_busy("counting devices")
        while (found := await self.roster.count_devices()) is None:
            await self._wait_for_agents()
        self.hub.be_busy("choosing the mesh")
        settled = await plan.settle(found)
        assert settled.devices is not None
        self.roster.devices = settled.devices
        await self._wait_for_agents()
        return settled

    def _begin(self, number: int) -> None:
        plan, devices = self.plan, self.plan.devices
        assert plan.setup is not None
        assert devices is not None
        setup = msgspec.structs.replace(
            plan.setup, generation=number, jax_coordinator=self.roster.leader_address()
        )
        self._watchdog = Watchdog(setup.num_processes, plan.command_timeout)
        self.hub.begin(setup)
        hosts = [self.roster.host(process) for process in range(setup.num_processes)]
        self.hub.record.began(number, {"fsdp": setup.fsdp, "ep": setup.ep, "tp": setup.tp}, hosts)
        self.hub.be_busy("starting")
        logger.info("generation %d: starting %d workers", number, setup.num_processes)

        def order(process: int, device_ids: list[int] | None) -> StartWorker:
            return StartWorker(
                generation=number,
                process=process,
                devices=devices,
                device_ids=device_ids,
                model_dir=setup.model_dir,
                model_files=plan.model_files,
                revision=plan.revision,
            )

        self.roster.start(number, order)

    async def _live(self, work: GenerationWork) -> None:
        ready = await self.hub.all_ready()
        assert self._watchdog is not None
        self._watchdog.ready()
        self._ready_at = asyncio.get_running_loop().time()
        self._has_been_ready = True
        await work(ready)

    async def _wait_for_agents(self) -> None:
        while absent := self.roster.absent():
            self.hub.be_busy(f"waiting for the agent of worker {', '.join(map(str, absent))}")
            try:
                async with asyncio.timeout(RELEASE_SECONDS):
                    await self.roster.changed()
            except TimeoutError:
                self.roster.release()

    async def _wait_for_explanation(self) -> None:
        """Wait for a sign that explains the first one, if there can be one."""
        with suppress(TimeoutError):
            async with asyncio.timeout(EXPLANATION_SECONDS):
                while (found := cause(self.signs.seen)).suspicion > Suspicion.KILLED:
                    if not (self.roster.has_workers or found.is_explained):
                        return
                    await self.signs.another()

    def _was_fruitful(self) -> bool:
        if self.hub.was_useful:
            return True
        now = asyncio.get_running_loop().time()
        return self._ready_at is not None and now - self._ready_at > FRUITFUL_SECONDS

    def _lose(self) -> GenerationLoss:
        """Fail all commands without a reply. Raises StartError if workers can never start like this."""
        sign = cause(self.signs.seen)
        if sign.is_final and not self._has_been_ready:
            raise StartError(sign.text)
        culprit, message = None if sign.orders else self.hub.current(sign.worker), sign.text
        if culprit is not None:
            culprit = max(culprit, sign.sequence or 0)  # a worker may be ahead of its replies
            message += f", during command {culprit} ({self.hub.name_of(culprit)})"
        self._ready_at = None
        group = log_groups.current()  # the log names it anyway
        loss = WorkerLost(message if group is None else f"group {group}: {message}", sign.by_command)
        self.hub.lose(loss, NO_COMMAND if culprit is None else culprit, sign.orders)
        return GenerationLoss(sign, message)

    def _with_hosts(self, sign: LossSign) -> LossSign:
        """Add to the text on which hosts the workers are."""
        if sign.orders:
            return sign
        late = self.hub.late() if sign.suspicion == Suspicion.LATE else [sign.worker]
        places = ", ".join(self.roster.place(worker) for worker in late)
        return replace(sign, text=f"{sign.text} ({places})" if places else sign.text)


def _of_work(living: asyncio.Task[None]) -> LossSign:
    """The sign that the end of the work is. Raises an error that is no loss."""
    try:
        living.result()
    except MeshError as error:
        is_fault = isinstance(error, ServerFault) and error.has_suspects
        return LossSign(Suspicion.FAULT if is_fault else Suspicion.FOLLOWED, 0, str(error), by_command=False)
    raise RuntimeError("the work with the workers ended without a reason")
