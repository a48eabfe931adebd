"""Builds the coordinator's parts from the configuration, and connects them."""

import asyncio
import os
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial

from sqlalchemy import update

from spmd_tx.byte_sizes import parse_size
from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.agent.base_model import fingerprint
from spmd_tx.coordinator.catalog.catalog import Catalog, open_catalog
from spmd_tx.coordinator.catalog.served_names import ServedNames, tokenizer_id
from spmd_tx.coordinator.checkpoints.catalog import CheckpointCatalog, open_checkpoints
from spmd_tx.coordinator.checkpoints.remote_store import CheckpointCache, open_remote_store
from spmd_tx.coordinator.checkpoints.snapshots import Snapshots
from spmd_tx.coordinator.checkpoints.store import CheckpointStore, LocalStore
from spmd_tx.coordinator.checkpoints.uploads import Uploads
from spmd_tx.coordinator.http.checkpoint_copies import CheckpointCopies
from spmd_tx.coordinator.http.checkpoint_uploads import CheckpointUploads
from spmd_tx.coordinator.http.implicit_samplers import ImplicitSamplers
from spmd_tx.coordinator.http.long_polls import Polls
from spmd_tx.coordinator.http.notices import Notices
from spmd_tx.coordinator.http.security.body_room import make_rooms
from spmd_tx.coordinator.http.security.quotas import Quotas
from spmd_tx.coordinator.http.security.signed_urls import open_signed_urls
from spmd_tx.coordinator.http.security.turns import Turns
from spmd_tx.coordinator.http.services import Health, RequestScheduler, Services
from spmd_tx.coordinator.mesh.compilation import Compilation
from spmd_tx.coordinator.mesh.generations import GenerationPlan, Generations
from spmd_tx.coordinator.mesh.hub import Hub
from spmd_tx.coordinator.mesh.loss_signs import LossSigns
from spmd_tx.coordinator.mesh.port import WorkerPort
from spmd_tx.coordinator.mesh.program_orders import ProgramOrders
from spmd_tx.coordinator.mesh.program_uses import ProgramUses
from spmd_tx.coordinator.mesh.roster import AgentRoster, HostDevices
from spmd_tx.coordinator.requests.given_up import GivenUpWatcher
from spmd_tx.coordinator.requests.line_numbers import LineNumbers
from spmd_tx.coordinator.requests.quarantine import open_quarantine
from spmd_tx.coordinator.requests.queue import RequestQueue, open_queue
from spmd_tx.coordinator.requests.runs.metric_names import MetricNames
from spmd_tx.coordinator.requests.runs.news_streams import NewsStreams
from spmd_tx.coordinator.requests.runs.sample_reader import SamplePlaces, SampleReader
from spmd_tx.coordinator.requests.traces import TraceExports
from spmd_tx.coordinator.retention.reaper import Reaper, limits_of
from spmd_tx.coordinator.runtime.at_work import AtWork
from spmd_tx.coordinator.sampling.bank import VersionBank
from spmd_tx.coordinator.sampling.batch import SampleBatch
from spmd_tx.coordinator.sampling.job import SamplingModel
from spmd_tx.coordinator.sampling.progress import SampleProgress
from spmd_tx.coordinator.sampling.routing_notes import RoutingFiles
from spmd_tx.coordinator.sampling.shapes import SamplingLimits
from spmd_tx.coordinator.sampling.stability_notes import StabilityFiles
from spmd_tx.coordinator.sampling.versions import Versions
from spmd_tx.coordinator.scheduler.generation import GenerationParts
from spmd_tx.coordinator.scheduler.scheduler import Scheduler
from spmd_tx.coordinator.server.health import ServerHealth
from spmd_tx.coordinator.server.mesh_choice import MeshChoice
from spmd_tx.coordinator.server.preflight import check_mesh, check_pages
from spmd_tx.coordinator.server.served_model import ServedModel
from spmd_tx.coordinator.server.shapes import make_menu, sampling_shapes, training_shapes
from spmd_tx.coordinator.server.telemetry import Telemetry, open_telemetry
from spmd_tx.coordinator.server.worker_setup import bank_slots, make_setup
from spmd_tx.coordinator.storage.database import Database, open_database
from spmd_tx.coordinator.storage.disk import DiskGuard
from spmd_tx.coordinator.storage.outages import retry_through_outages
from spmd_tx.coordinator.storage.tables import ServerState
from spmd_tx.coordinator.tenancy.keyring import open_keyring
from spmd_tx.coordinator.text.prompt_texts import PromptTexts
from spmd_tx.coordinator.training.custom_loss_catalog import CustomLossCatalog
from spmd_tx.coordinator.training.custom_loss_runs import LossRuns, loss_limits
from spmd_tx.coordinator.training.execute import Training
from spmd_tx.coordinator.training.slots import TrainingSlots
from spmd_tx.coordinator.wire.limits import Limits
from spmd_tx.errors import DatabaseDamaged
from spmd_tx.models.declared.model import Model
from spmd_tx.protocol.memory_plan import MemoryPlan


@dataclass(frozen=True)
class Stores:
    """Holds what reads and writes the database and the data directory."""

    database: Database
    disk: DiskGuard
    queue: RequestQueue
    reaper: Reaper
    catalog: Catalog
    checkpoints: CheckpointCatalog
    telemetry: Telemetry | None  # None: nothing is sent to a collector


@dataclass(frozen=True)
class Parts:
    """Holds everything that runs in the coordinator but the HTTP server and the worker processes."""

    services: Services
    scheduler: Scheduler
    hub: Hub
    health: ServerHealth
    generations: Generations
    given_up: GivenUpWatcher
    uses: ProgramUses


async def open_parts(
    config: ServerConfig, model: ServedModel, port: WorkerPort, stack: AsyncExitStack
) -> Parts:
    """Open the database and files, and connect everything; the stack closes them."""
    clock = asyncio.get_running_loop().time
    stores = await open_stores(config, model.config, stack)
    database = stores.database
    snapshots = Snapshots(database, config.data_dir / "snapshots", config.snapshot_seconds, clock=clock)
    quarantine = await open_quarantine(database, config.data_dir)
    progress = SampleProgress()
    loss_runs = LossRuns(loss_limits(config.bounds))
    mesh = await asyncio.to_thread(MeshChoice, config, model.directory)
    uses = await asyncio.to_thread(ProgramUses, config.data_dir / "program_uses.json")
    builder = GenerationBuilder(
        mesh=mesh,
        model=model,
        catalog=stores.catalog,
        checkpoints=stores.checkpoints,
        snapshots=snapshots,
        custom_losses=CustomLossCatalog(database, stores.queue),
        loss_runs=loss_runs,
        progress=progress,
        at_work=quarantine.at_work,
        uses=uses,
    )
    hub = Hub(port.send, on_written=snapshots.writes.take, on_custom_loss=loss_runs.take)
    if (telemetry := stores.telemetry) is not None:
        hub.contexts_of = lambda requests: telemetry.contexts(stores.queue.unfinished_of(requests))
    health = ServerHealth(hub)
    signs = LossSigns()
    plan = await make_plan(mesh, model, database)
    roster = AgentRoster(port.send, config.num_processes, plan.devices, signs.add)
    generations = Generations(port, hub, roster, signs, plan)
    scheduler = Scheduler(
        stores.queue, stores.catalog, snapshots, builder.make, clock, quarantine, lambda: health.phase
    )
    if model.numbers is not None:
        steps, ranks = await scheduler.steps_to_run_again(), await stores.catalog.ranks()
        await asyncio.to_thread(model.numbers.settle, steps, ranks)
    services = await open_services(config, model, stores, scheduler, health, progress, stack)
    given_up = GivenUpWatcher(database, stores.queue, scheduler)
    return Parts(services, scheduler, hub, health, generations, given_up, uses)


async def open_stores(config: ServerConfig, model: Model, stack: AsyncExitStack) -> Stores:
    """Open the database and the data directory, and delete what is too old; the stack closes them."""
    database = await open_database(config.database_url, config.data_dir)
    stack.push_async_callback(database.close)
    disk = DiskGuard(config.data_dir, config.min_free_disk)
    queue = await open_queue(database, config.data_dir, disk)
    stack.callback(queue.close)
    telemetry = await asyncio.to_thread(open_telemetry, os.environ)
    if telemetry is not None:
        queue.on_end = telemetry.ended
        stack.push_async_callback(asyncio.to_thread, telemetry.close)
    reaper = Reaper(database, config.data_dir, limits_of(config), queue.files_to_be)
    await reaper.reap(at_rest=True)
    catalog = await open_catalog(database)
    checkpoints = await open_checkpoints(
        database,
        await asyncio.to_thread(open_store, config),
        config.model_name,
        disk,
        config.bounds.checkpoint_bytes,
        model,
    )
    return Stores(database, disk, queue, reaper, catalog, checkpoints, telemetry)


async def open_services(
    config: ServerConfig,
    model: ServedModel,
    stores: Stores,
    scheduler: RequestScheduler,
    health: Health,
    progress: SampleProgress,
    stack: AsyncExitStack,
) -> Services:
    """Make what the routes need, around a scheduler; the stack closes it."""
    database, queue, bounds = stores.database, stores.queue, config.bounds
    keyring = await open_keyring(database, config.data_dir)
    prompt_texts = PromptTexts(model.directory, model.text, model.max_context, config.bounds)
    stack.push_async_callback(prompt_texts.close)
    samples = SampleReader(SamplePlaces(config.data_dir / "payloads", model.directory), model.text, bounds)
    stack.push_async_callback(samples.close)
    return Services(
        config=config,
        model=model.config,
        max_context=model.max_context,
        tokenizer_id=tokenizer_id(config.base_model, model.directory),
        database=database,
        catalog=stores.catalog,
        checkpoints=stores.checkpoints,
        copies=CheckpointCopies(stores.checkpoints, queue),
        uploads=CheckpointUploads(
            Uploads(config.data_dir, config.bounds.open_uploads),
            stores.checkpoints,
            queue,
            stores.disk,
            model.config,
            config.model_name,
        ),
        queue=queue,
        scheduler=scheduler,
        health=health,
        storage=stores.disk,
        reaper=stores.reaper,
        keyring=keyring,
        signed_urls=await asyncio.to_thread(open_signed_urls, config.data_dir),
        traces=TraceExports(database, config.data_dir),
        quotas=Quotas(database, stores.catalog, queue, config.bounds),
        text=model.text,
        prompt_texts=prompt_texts,
        samples=samples,
        progress=progress,
        implicit_samplers=ImplicitSamplers(
            stores.catalog, ServedNames(config.model_names, model.max_context)
        ),
        notices=Notices(),
        body_rooms=make_rooms(bounds),
        turns=Turns(bounds),
        polls=Polls(bounds.polls),
        line_numbers=LineNumbers(database, bounds.seq_ids_ahead),
        metric_names=MetricNames(database, bounds.metric_names, bounds.metric_name_characters),
        streams=NewsStreams(queue.news, stores.catalog, keyring, bounds),
    )


def open_store(config: ServerConfig) -> CheckpointStore:
    """Open the place of named checkpoints. Blocks. Raises StartError."""
    base = config.checkpoints_base
    if base is None or "://" not in base:
        return LocalStore(config.checkpoints_dir)
    cache = CheckpointCache(config.checkpoints_dir, parse_size(config.max_checkpoint_cache, whole=0))
    return open_remote_store(base, config.data_dir, cache)


async def make_plan(mesh: MeshChoice, model: ServedModel, database: Database) -> GenerationPlan:
    """Make the plan for all generations, or one that ``settle`` completes when the devices are known."""
    plan = GenerationPlan(
        model_files=model.files or await asyncio.to_thread(fingerprint, model.directory),
        revision=model.commit,
        command_timeout=mesh.config.command_timeout,
        next_number=partial(next_generation, database),
    )

    def completed(config: ServerConfig) -> GenerationPlan:
        check_mesh(config, model.config)
        setup = make_setup(config, model.directory, model.max_context, model.config.expert_lora)
        return replace(plan, setup=setup, devices=config.devices_per_process)

    async def settle(found: Sequence[HostDevices]) -> GenerationPlan:
        return completed(await mesh.settle(found))

    return replace(plan, settle=settle) if mesh.config.mesh is None else completed(mesh.config)


async def next_generation(database: Database) -> int:
    """Count up to a number that no generation has had, which tells its messages from older ones."""
    count = (
        update(ServerState).values(generation=ServerState.generation + 1).returning(ServerState.generation)
    )

    async def counted() -> int | None:
        async with database.transaction() as db:
            return (await db.execute(count)).scalar_one_or_none()

    number = await retry_through_outages(counted)
    if number is None:
        raise DatabaseDamaged("the table server has lost its row; restore the database from a backup")
    return number


@dataclass(frozen=True)
class GenerationBuilder:
    """Makes the parts that every generation of workers gets anew."""

    mesh: MeshChoice
    model: ServedModel
    catalog: Catalog
    checkpoints: CheckpointCatalog
    snapshots: Snapshots
    custom_losses: CustomLossCatalog
    loss_runs: LossRuns
    progress: SampleProgress
    at_work: AtWork
    uses: ProgramUses

    @property
    def config(self) -> ServerConfig:
        """The configuration, with the mesh that workers have."""
        return self.mesh.config

    def make(self, workers: Hub, plan: MemoryPlan) -> GenerationParts:
        """Make the parts for workers that hold nothing yet; the model's text must be loaded."""
        config, model = self.config, self.model
        check_pages(plan.pages, config.page_size, model.max_context)
        bank = VersionBank(
            bank_slots(config), config.data_dir / "versions", whole_models=config.full_parameters
        )
        versions = Versions(
            self.catalog,
            self.checkpoints,
            bank,
            config.data_dir / "versions",
            config.max_rank,
            self.snapshots.writes,
        )
        ahead = (
            make_menu(config, model.config, model.max_context, plan) if config.warm_up == "background" else []
        )
        orders = ProgramOrders(
            (program for program in ahead if program not in workers.avoided),
            aside=workers.compiles_aside,
            threads=workers.compile_threads,
            uses=self.uses,
        )
        return GenerationParts(
            workers=workers,
            training=self._training(versions, plan, workers.kernels),
            versions=versions,
            sampling=self._sampling(bank, orders, plan),
            compilation=Compilation(workers, orders),
        )

    def _training(self, versions: Versions, plan: MemoryPlan, kernels: str) -> Training:
        config, model = self.config, self.model
        return Training(
            checkpoints=self.checkpoints,
            samplers=self.catalog,
            versions=versions,
            slots=(
                TrainingSlots(1, until_session_ends=True)
                if config.full_parameters
                else TrainingSlots(config.max_lora_adapters)
            ),
            limits=Limits(model.config.vocab_size, model.max_context, config.max_rank, config.bounds),
            shapes=replace(training_shapes(config, model.config, model.max_context, plan), kernels=kernels),
            base_model=config.model_name,
            snapshots=self.snapshots,
            stability=StabilityFiles(config.data_dir),
            custom_losses=self.custom_losses,
            loss_runs=self.loss_runs,
            routing=RoutingFiles(config.data_dir) if model.config.n_experts else None,
        )

    def _sampling(self, bank: VersionBank, orders: ProgramOrders, plan: MemoryPlan) -> SampleBatch:
        config, model = self.config, self.model
        limits = SamplingLimits(
            shapes=sampling_shapes(config, model.max_context, plan),
            pages_per_shard=plan.pages,
            decode_steps=config.decode_steps,
            state_slots=plan.state_slots,
        )
        text = model.text.loaded
        sampled = SamplingModel(
            model.config, model.max_context, text.tokenizer, text.eos_token_ids, config.batch_invariant
        )
        return SampleBatch(sampled, bank, limits, orders, self.progress.hear, self.at_work)
