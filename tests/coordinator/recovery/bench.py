"""A coordinator without HTTP on a device without numbers; both can be killed at any moment, and come back."""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.bases.served_base import open_base
from spmd_tx.coordinator.catalog.catalog import open_catalog
from spmd_tx.coordinator.checkpoints.catalog import open_checkpoints
from spmd_tx.coordinator.checkpoints.snapshots import Snapshots
from spmd_tx.coordinator.checkpoints.store import LocalStore
from spmd_tx.coordinator.groups.of_base import GroupsOfBase
from spmd_tx.coordinator.groups.same_numbers import SameNumbers
from spmd_tx.coordinator.mesh.program_uses import ProgramUses
from spmd_tx.coordinator.mesh.warm_up_progress import CompileProgress
from spmd_tx.coordinator.requests.quarantine import Quarantine
from spmd_tx.coordinator.requests.queue import open_queue
from spmd_tx.coordinator.requests.records import Finished, Outcome
from spmd_tx.coordinator.sampling.progress import SampleProgress
from spmd_tx.coordinator.sampling.version_store import VersionStore
from spmd_tx.coordinator.scheduler.scheduler import ScheduledGroup, Scheduler
from spmd_tx.coordinator.server.generation_builder import GenerationBuilder
from spmd_tx.coordinator.server.mesh_choice import MeshChoice
from spmd_tx.coordinator.storage.database import Database, open_database
from spmd_tx.coordinator.storage.disk import DiskGuard
from spmd_tx.coordinator.text.model_text import LazyModelText, ModelText
from spmd_tx.coordinator.text.served_model import ServedModel
from spmd_tx.coordinator.training.custom_loss_catalog import CustomLossCatalog
from spmd_tx.coordinator.training.custom_loss_runs import LossRuns, loss_limits
from spmd_tx.coordinator.wire.training_protobuf import PROTOBUF
from spmd_tx.errors import MeshError, WorkerLost
from spmd_tx.protocol.commands import AnyCommand
from spmd_tx.protocol.memory_plan import MemoryPlan
from spmd_tx.protocol.programs import ProgramShape
from spmd_tx.protocol.reports import Compiled, Reply, Written
from tests.coordinator.recovery.replay_device import ReplayDevice, write_state
from tests.coordinator.sampling.bench import MODEL, Words

Session = AbstractAsyncContextManager[AsyncSession]

PAGES = 64
PLAN = MemoryPlan(pages=PAGES, train_tokens=128, decode_rows=4, adapter_slots=2)
DELAYS = itertools.cycle([0.0, 0.0, 0.0, 0.03, 0.0, 0.0, 0.002])  # seconds
CONTEXT = 64  # tokens
TRAINER = "trainer"


class SimulatedWorkers:
    """Commands are executed, and replies sent, when the test says so."""

    def __init__(self, on_written: Callable[[Written], None]) -> None:
        self.busy: str | None = None
        self._on_written = on_written
        self.programs = CompileProgress()
        self.compiles_aside, self.compile_threads, self.kernels = False, 1, ""
        self.avoided: set[ProgramShape] = set()
        self.device = ReplayDevice(PAGES, page_size=16)
        self.pending: deque[tuple[AnyCommand, asyncio.Future[Reply], frozenset[str]]] = deque()
        self._sent = 0
        self._lost: MeshError | None = None

    def send(self, command: AnyCommand, requests: Iterable[str] = ()) -> asyncio.Future[Reply]:
        answer: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        if self._lost is not None:
            _fail(answer, self._lost)
        else:
            self.pending.append((command, answer, frozenset(requests)))
        return answer

    def compile(
        self, program: ProgramShape, *, lane: int, is_last: bool, is_hurried: bool
    ) -> asyncio.Future[Compiled]:
        """Nothing takes any time but commands."""
        answer: asyncio.Future[Compiled] = asyncio.get_running_loop().create_future()
        if self._lost is not None:
            _fail(answer, self._lost)
        else:
            answer.set_result(Compiled(generation=1, process=0, number=0, seconds=0.0))
        return answer

    def finish(self, count: int) -> int:
        """Execute so many commands, and reply; returns how many there were."""
        done = min(count, len(self.pending))
        for _ in range(done):
            command, answer, _ = self.pending.popleft()
            arrays, metrics = self.device.execute(command)
            reply = Reply(generation=1, process=0, sequence=self._sent, arrays=arrays, metrics=metrics)
            self._sent += 1
            if not answer.done():
                answer.set_result(reply)
        return done

    def write(self) -> int:
        """Complete all folders that were begun."""
        unwritten, self.device.unwritten = self.device.unwritten, []
        for path, write in unwritten:
            write(Path(path))
            self._on_written(Written(generation=1, process=0, path=path))
        return len(unwritten)

    def lose(self, error: MeshError, executed: int) -> None:
        """End; some commands may have been executed, and snapshots begun, of which nobody hears any more."""
        for command, *_ in list(self.pending)[:executed]:
            self.device.execute(command)
        for path, write in self.device.unwritten:
            if write.func is write_state:  # other folders get their names when they are complete
                Path(path).mkdir(parents=True, exist_ok=True)
        self._lost = error
        for _, answer, _ in self.pending:
            _fail(answer, error)
        self.pending.clear()


class UnhurriedThreads(ThreadPoolExecutor):
    """Some work takes longer than other work, so that outcomes come in another order than commands."""

    def submit(self, work, /, *arguments, **named):  # pyright: ignore[reportIncompatibleMethodOverride]
        delay = next(DELAYS)

        def later():
            time.sleep(delay)
            return work(*arguments, **named)

        return super().submit(later)


class Life:
    """Of a process, for its database: what was begun when it ends is still done, but nobody hears of it."""

    def __init__(self, database: Database) -> None:
        self._is_over = False
        self._in_use = 0
        self._idle = asyncio.Event()
        self._idle.set()
        database.transaction = partial(self._use, database.transaction)
        database.reading = partial(self._use, database.reading)
        database.write = partial(self._write, database.write)

    @property
    def is_in_use(self) -> bool:
        return self._in_use > 0

    async def end(self) -> None:
        self._is_over = True
        await self._idle.wait()

    async def _write(self, write, work):
        async with self._use(nullcontext):
            return await write(work)

    @asynccontextmanager
    async def _use(self, session: Callable[[], Session]) -> AsyncIterator[AsyncSession]:
        if self._is_over:
            await asyncio.Event().wait()
        self._in_use += 1
        self._idle.clear()
        try:
            async with session() as db:
                yield db
        finally:
            self._in_use -= 1
            if not self._in_use:
                self._idle.set()
        if self._is_over:
            await asyncio.Event().wait()


class SimulatedGroup:
    """Runs generations of workers of one group, one after the other, unless it has left."""

    def __init__(self, name: str, beside: GroupsOfBase, scheduler: Scheduler, snapshots: Snapshots) -> None:
        self.name, self.trains = name, name == TRAINER
        self.is_ready = False
        self.generations = 0
        self.scheduler = scheduler
        self.workers = SimulatedWorkers(snapshots.writes.take)
        self._beside, self._snapshots = beside, snapshots
        self._is_there = asyncio.Event()
        self._is_there.set()

    def leave(self) -> None:
        """Have no more workers once the present ones are lost."""
        self._is_there.clear()

    def join(self) -> None:
        self._is_there.set()

    async def run(self) -> None:
        while True:
            await self._is_there.wait()
            self.workers = SimulatedWorkers(self._snapshots.writes.take)
            self.generations += 1
            self.is_ready = True
            self._beside.ready(self)
            try:
                await self.scheduler.run(self.workers, PLAN)  # pyright: ignore[reportArgumentType]
            except MeshError:
                continue
            finally:
                self.is_ready = False
                self._beside.lost(self)


class Coordinator:
    """One life of the coordinator's process, on a folder that outlives it."""

    def __init__(self, folder: Path, samplers: int = 0) -> None:
        """``samplers`` is the number of groups that only sample beside the one that trains."""
        self.names = [TRAINER, *(f"sampler-{number}" for number in range(samplers))]
        self.config = ServerConfig(
            base_model="tiny",
            fully_sharded_data_parallel_size=1,
            expert_parallel_size=1,
            tensor_parallel_size=1,
            warm_up="off",
            data_dir=folder,
            max_lora_adapters=2,
            max_lora_rank=4,
            decode_steps=4,
            sampler_slots=2,
            snapshot_seconds=0,
        )
        self.groups: list[SimulatedGroup] = []
        self._is_holding = False
        self._held: list[tuple[str, Outcome]] = []
        self._threads = UnhurriedThreads(4)
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        config, clock = self.config, asyncio.get_running_loop().time
        asyncio.get_running_loop().set_default_executor(self._threads)
        self.database = await open_database(None, config.data_dir)
        self._life = Life(self.database)
        self.queue = await open_queue(self.database, config.data_dir)
        self.queue.resolve = partial(self._resolve, self.queue.resolve)
        self.catalog = await open_catalog(self.database)
        checkpoints = await open_checkpoints(
            self.database,
            LocalStore(config.checkpoints_dir),
            DiskGuard(config.checkpoints_dir),
        )
        words = ModelText(Words(), None)  # pyright: ignore[reportArgumentType]
        model = ServedModel(config.data_dir, MODEL, CONTEXT, LazyModelText(lambda: words))
        await model.text.get()
        quarantine = Quarantine()
        store = VersionStore(config.data_dir / "versions", is_shared=len(self.names) > 1)
        roles = [(name, name == TRAINER) for name in self.names]
        self.beside = beside = GroupsOfBase(self.queue, roles, store, SameNumbers(TRAINER, all_bits=False))
        for name in self.names:
            snapshots = Snapshots(
                self.database, config.data_dir / "snapshots", config.snapshot_seconds, clock
            )
            role = "train" if name == TRAINER else "sample"
            of_group = msgspec.structs.replace(config, group="main" if name == TRAINER else name, role=role)
            builder = GenerationBuilder(
                mesh=MeshChoice(of_group, config.data_dir),
                base=open_base(of_group, model, AsyncExitStack()),
                catalog=self.catalog,
                checkpoints=checkpoints,
                store=store,
                snapshots=snapshots,
                custom_losses=CustomLossCatalog(self.database, self.queue),
                loss_runs=LossRuns(loss_limits(config.bounds)),
                progress=SampleProgress(),
                at_work=quarantine.at_work,
                uses=ProgramUses(),
            )
            scheduled = ScheduledGroup(
                takes=lambda request, name=name: beside.home(request) == name, siblings=beside.siblings
            )
            scheduler = Scheduler(
                self.queue, self.catalog, snapshots, builder.make, clock, quarantine, scheduled
            )
            self.groups.append(SimulatedGroup(name, beside, scheduler, snapshots))
            beside.add(self.groups[-1])
        works = [self.queue.run(beside.arrive), *(group.run() for group in self.groups)]
        self._tasks = [asyncio.create_task(work) for work in works]

    @property
    def scheduler(self) -> Scheduler:
        """That of the group that trains."""
        return self.groups[0].scheduler

    @property
    def workers(self) -> SimulatedWorkers:
        """Those of the group that trains."""
        return self.groups[0].workers

    def hold_outcomes(self) -> None:
        """From now on outcomes of gradients take longer than all others; a kill may lose them."""
        self._is_holding = True

    def release_outcomes(self) -> None:
        self._is_holding = False
        held, self._held = self._held, []
        for request_id, outcome in held:
            self.queue.resolve(request_id, outcome)

    def _resolve(self, resolve: Callable[[str, Outcome], None], request_id: str, outcome: Outcome) -> None:
        is_gradient = isinstance(outcome, Finished) and outcome.content_type == PROTOBUF
        if self._is_holding and is_gradient:
            self._held.append((request_id, outcome))
        else:
            resolve(request_id, outcome)

    @property
    def uses_its_database(self) -> bool:
        return self._life.is_in_use

    def check(self) -> None:
        """The service has made no mistake that ended it."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def kill(self) -> None:
        """What is not durable is gone; nothing is said to anybody."""
        await self._life.end()
        await _end(asyncio.all_tasks() - {asyncio.current_task()})
        self._threads.shutdown()
        self.queue.close()
        await self.database.close()


async def _end(tasks: Collection[asyncio.Task | None]) -> None:
    """Cancel until it is over: some hold out for others that have not ended yet."""
    unfinished = [task for task in tasks if task is not None]
    while unfinished:
        for task in unfinished:
            task.cancel()
        await asyncio.wait(unfinished, timeout=0.05)
        unfinished = [task for task in unfinished if not task.done()]


def lost(by_command: bool = False) -> WorkerLost:
    return WorkerLost("worker 1 was killed by signal 9", by_command)


def _fail(answer: asyncio.Future[Reply], error: MeshError) -> None:
    if not answer.done():
        answer.set_exception(error)
        answer.exception()  # nobody may ask
