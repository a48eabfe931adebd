"""A scheduler with everything real but the log and the workers, and requests for it."""

import asyncio
import contextlib
import itertools
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from spmd_tx.bounds import Bounds
from spmd_tx.coordinator.catalog.catalog import Catalog, open_catalog
from spmd_tx.coordinator.checkpoints.catalog import open_checkpoints
from spmd_tx.coordinator.checkpoints.checkpoint_base import CheckpointBase
from spmd_tx.coordinator.checkpoints.snapshots import Snapshots
from spmd_tx.coordinator.checkpoints.store import LocalStore
from spmd_tx.coordinator.mesh.compilation import Compilation
from spmd_tx.coordinator.mesh.program_orders import ProgramOrders
from spmd_tx.coordinator.requests.records import Failed, Finished
from spmd_tx.coordinator.sampling.bank import VersionBank
from spmd_tx.coordinator.sampling.stability_notes import StabilityFiles
from spmd_tx.coordinator.sampling.version_store import VersionStore
from spmd_tx.coordinator.sampling.versions import Versions
from spmd_tx.coordinator.scheduler.generation import GenerationParts
from spmd_tx.coordinator.scheduler.scheduler import ScheduledGroup, Scheduler
from spmd_tx.coordinator.storage.database import open_database
from spmd_tx.coordinator.storage.disk import DiskGuard
from spmd_tx.coordinator.training.attention_cost import AttentionCost
from spmd_tx.coordinator.training.custom_loss_runs import LossRuns, loss_limits
from spmd_tx.coordinator.training.execute import Training
from spmd_tx.coordinator.training.packing import TrainingShapes
from spmd_tx.coordinator.training.slots import TrainingSlots
from spmd_tx.coordinator.wire import tinker_pb2
from spmd_tx.coordinator.wire import training as training_schemas
from spmd_tx.coordinator.wire.limits import Limits
from spmd_tx.protocol.memory_plan import MemoryPlan
from tests.coordinator.scheduler.table_integrity import check_integrity
from tests.coordinator.training.fake_log import FakeLog
from tests.coordinator.training.fake_trainer import FakeCustomLosses, FakeTrainer
from tests.support.databases import make_database
from tests.support.ready_programs import EverythingReady

BASE_MODEL = "tiny"
BASE = CheckpointBase((BASE_MODEL,))
SHARDS = 2
LIMITS = Limits(vocab_size=1000, max_context=256, max_rank=8)
SHAPES = TrainingShapes(SHARDS, 2048, (256, 2048), max_context=256, attention=AttentionCost(5e-4))
SHORT_ROWS = TrainingShapes(SHARDS, 128, (256,), max_context=64, attention=AttentionCost(5e-4))
HALF = [60] * 2  # of a micro-batch of short rows: two models meet in it


class NoSampling:
    """A sample batch without samples."""

    may_send = False

    def program_requests(self):
        return []

    def take_dropped(self):
        return []

    def waiting(self):
        return False

    def unanswered(self):
        return {}


class BenchModels:
    """The models that were ever created, in the order of their creation."""

    def __init__(self, log):
        self._log = log
        self.ended = set()  # sessions

    async def open_models(self, others):
        creations = [request for request in self._log.requests.values() if request.seq_id == 0]
        lines = [request for request in creations if request.kind in ("create_model", "load_weights")]
        return [
            BenchModel(request.line, request.session_id)
            for request in lines
            if request.session_id not in self.ended or request.session_id in others
        ]

    def has_ended(self, session_id):
        return session_id in self.ended


class BenchModel(NamedTuple):
    id: str
    session_id: str


class TrainingBench:
    """Sessions are named by what stands before the first ``:`` of a model."""

    def __init__(
        self, directory: Path, database, catalog: Catalog, checkpoints, slots: int, workers, sampling, shapes
    ):
        self.log, self.workers = FakeLog(lambda request: self.scheduler.arrive(request)), workers
        self.catalog, self.checkpoints, self.directory = catalog, checkpoints, directory
        self.slots, self.sampling, self.shapes = slots, sampling, shapes
        clock = asyncio.get_running_loop().time
        self.snapshots = Snapshots(database, directory / "snapshots", 3600.0, clock)
        self.store = VersionStore(directory / "versions")
        self.models = BenchModels(self.log)
        self.custom_losses = FakeCustomLosses(self.log)
        self.loss_runs = LossRuns(loss_limits(Bounds()))
        self.phase = None  # of the server
        self.trains = True  # the workers of the next generation
        self.scheduler = Scheduler(
            self.log,
            self.models,
            self.snapshots,
            self.equip,
            clock,
            group=ScheduledGroup(phase=lambda: self.phase),
        )

    def equip(self, workers, plan):
        workers.on_written, workers.on_custom_loss = self.snapshots.writes.take, self.loss_runs.take
        self.bank = VersionBank(slots=6, directory=self.directory / "versions")
        versions = Versions(
            self.catalog,
            partial(self.checkpoints.open, base=BASE),
            self.bank,
            self.store,
            LIMITS.max_rank,
            self.snapshots.writes,
        )
        training = Training(
            checkpoints=self.checkpoints,
            base=BASE,
            samplers=self.catalog,
            versions=versions,
            slots=TrainingSlots(self.slots),
            limits=LIMITS,
            shapes=self.shapes,
            snapshots=self.snapshots,
            stability=StabilityFiles(self.directory),
            custom_losses=self.custom_losses,
            loss_runs=self.loss_runs,
        )
        self.versions = versions
        if hasattr(workers, "compile"):
            self.orders = ProgramOrders(workers.menu)
            compilation, sampling = Compilation(workers, self.orders), self.sampling(self.bank, self.orders)
            return GenerationParts(workers, training, versions, sampling, compilation)
        sampling = self.sampling(self.bank) if callable(self.sampling) else self.sampling
        sampling, compilation = sampling or NoSampling(), Compilation(workers, EverythingReady())
        return GenerationParts(workers, training, versions, sampling, compilation, trains=self.trains)

    async def start(self):
        """Begin a generation with the present workers."""
        self.run = asyncio.create_task(
            self.scheduler.run(self.workers, MemoryPlan(pages=1, train_tokens=1, decode_rows=1))
        )
        await self.until(lambda: self.scheduler._execution is not None)

    async def version_of(self, sampler_id):
        return await self.versions.of(sampler_id, self.scheduler._execution._supply.restored)

    def create(self, model, seed=0, **lora):
        return self.submit(
            "create_model",
            model,
            0,
            training_schemas.CreateModelRequest(
                model, 0, BASE_MODEL, None, training_schemas.LoraConfig(lora.pop("rank", 4), seed, **lora)
            ),
        )

    def train(self, model, seq_id, *lengths, kind="forward_backward", **options):
        body = forward_backward(*lengths, forward_only=kind == "forward", **options)
        return self.log.submit(kind, model, seq_id, body)

    def step(self, model, seq_id, **adam):
        params = training_schemas.AdamParams(**adam)
        return self.submit(
            "optim_step", model, seq_id, training_schemas.OptimStepRequest(model, seq_id, params)
        )

    def save(self, model, seq_id, name, **options):
        return self.submit(
            "save_weights", model, seq_id, training_schemas.SaveWeightsRequest(model, seq_id, name, **options)
        )

    def save_for_sampler(self, model, seq_id, name=None, **options):
        request = training_schemas.SaveWeightsForSamplerRequest(model, seq_id, name, **options)
        return self.submit("save_weights_for_sampler", model, seq_id, request)

    def load(self, model, seq_id, path, optimizer=False):
        return self.submit(
            "load_weights", model, seq_id, training_schemas.LoadWeightsRequest(path, optimizer)
        )

    def submit(self, kind, line, seq_id, body):
        return self.log.submit(kind, line, seq_id, msgspec.json.encode(body))

    async def result(self, request_id):
        """The result of a request that succeeds: JSON decoded, protobuf parsed."""
        outcome = await self.outcome(request_id)
        assert isinstance(outcome, Finished), outcome
        if outcome.content_type == "application/json":
            return msgspec.json.decode(outcome.body)
        return tinker_pb2.ForwardBackwardOutput.FromString(outcome.body)

    async def failure(self, request_id, category="user"):
        """The message of a request that fails."""
        outcome = await self.outcome(request_id)
        assert isinstance(outcome, Failed), outcome
        assert outcome.category == category
        return outcome.error

    async def outcome(self, request_id):
        """How a request ends, unless the scheduler does so first."""
        check_integrity(self.scheduler._table)
        settled = asyncio.create_task(self.log.outcome(request_id))
        await asyncio.wait([settled, self.run], return_when=asyncio.FIRST_COMPLETED)
        if not settled.done():
            settled.cancel()
            await self.run
        return await settled

    async def until(self, condition):
        """Return when something has become true; if it never does, the test runs into its time limit."""
        while not condition():
            assert not self.run.done(), "the scheduler has ended"
            check_integrity(self.scheduler._table)
            await asyncio.sleep(0.001)

    async def settled(self):
        """Return when every request has its outcome."""
        await self.until(lambda: self.log.payloads.keys() == self.log.outcomes.keys())

    async def prepared(self, model, steps=1):
        """Return when a model has this many steps ready to be sent."""
        await self.until(lambda: len(self.scheduler._execution.lines[model].model.unsent) >= steps)

    async def hold(self, model, seq_id):
        """Fill the pipeline, so that what comes next waits; returns the next free seq_id."""
        await self.settled()
        self.workers.is_holding = True
        for number in range(3):
            self.step(model, seq_id + number)
        await self.until(lambda: len(self.workers.held) == 3)
        return seq_id + 3

    def let_go(self):
        self.workers.is_holding = False
        self.workers.answer(len(self.workers.held))


@contextlib.asynccontextmanager
async def running(directory: Path, slots: int = 2, sampling=None, workers=None, shapes=SHAPES):
    """A bench whose scheduler runs. ``sampling`` may be a function of the bank."""
    if not (directory / "spmd_tx.db").exists():
        make_database(directory)
    database = await open_database(None, directory)
    catalog = await open_catalog(database)
    store, disk = LocalStore(directory / "checkpoints"), DiskGuard(directory / "checkpoints")
    checkpoints = await open_checkpoints(database, store, disk)
    bench = TrainingBench(
        directory, database, catalog, checkpoints, slots, workers or FakeTrainer(), sampling, shapes
    )
    await bench.start()
    try:
        yield bench
    finally:
        bench.run.cancel()
        await asyncio.wait([bench.run])
        await database.close()


def forward_backward(*lengths, loss_fn="cross_entropy", forward_only=False, token=1, **changes):
    """A body with one datum for each length; ``changes`` replace loss inputs of all."""
    request = tinker_pb2.ForwardBackwardRequest(loss_fn=loss_fn, forward_only=forward_only)
    for length in lengths:
        datum = request.data.add()
        tokens = np.full(length, token, np.int32)
        datum.model_input.add().encoded_text.tokens = tokens.tobytes()
        inputs = {"target_tokens": tokens.astype(np.int64)}
        if loss_fn == "cross_entropy":
            inputs["weights"] = np.ones(length, np.float32)
        else:
            inputs |= {"logprobs": np.zeros(length, np.float32), "advantages": np.ones(length, np.float32)}
        for name, values in (inputs | changes).items():
            dtype = tinker_pb2.DTYPE_INT64 if values.dtype.kind == "i" else tinker_pb2.DTYPE_FLOAT32
            tensor = tinker_pb2.Tensor(dense=values.tobytes(), dtype=dtype, shape=values.shape)
            datum.loss_fn_inputs[name].CopyFrom(tensor)
    return request.SerializeToString()


def logprobs(output):
    """Per datum."""
    arrays = []
    for record in output.loss_fn_outputs:
        tensor = record.fields["logprobs"]
        offsets = np.frombuffer(tensor.offsets, np.int64)
        arrays += [np.frombuffer(tensor.data[a:b], np.float32) for a, b in itertools.pairwise(offsets)]
    return arrays
