"""Builds the coordinator's parts from the configuration, and closes them again. Has no logic of its own."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sqlalchemy import update

from spmd_tx.byte_sizes import parse_size
from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.agent.base_model import find_model, fingerprint
from spmd_tx.coordinator.catalog.catalog import Catalog, open_catalog
from spmd_tx.coordinator.checkpoints.catalog import CheckpointCatalog, open_checkpoints
from spmd_tx.coordinator.checkpoints.remote_store import CheckpointCache, open_remote_store
from spmd_tx.coordinator.checkpoints.snapshots import Snapshots
from spmd_tx.coordinator.checkpoints.store import CheckpointStore, LocalStore
from spmd_tx.coordinator.http.body_room import make_rooms
from spmd_tx.coordinator.http.checkpoint_copies import CheckpointCopies
from spmd_tx.coordinator.http.implicit_samplers import ImplicitSamplers
from spmd_tx.coordinator.http.long_polls import Polls
from spmd_tx.coordinator.http.notices import Notices
from spmd_tx.coordinator.http.quotas import Quotas
from spmd_tx.coordinator.http.services import Services
from spmd_tx.coordinator.http.signed_urls import open_signed_urls
from spmd_tx.coordinator.mesh.compilation import Compilation
from spmd_tx.coordinator.mesh.generations import Generations, Plan
from spmd_tx.coordinator.mesh.hub import Hub
from spmd_tx.coordinator.mesh.port import WorkerPort
from spmd_tx.coordinator.mesh.program_orders import ProgramOrders
from spmd_tx.coordinator.mesh.roster import AgentRoster
from spmd_tx.coordinator.requests.given_up import OperatorsWishes
from spmd_tx.coordinator.requests.line_numbers import LineNumbers
from spmd_tx.coordinator.requests.quarantine import open_quarantine
from spmd_tx.coordinator.requests.queue import open_queue
from spmd_tx.coordinator.requests.traces import TraceExports
from spmd_tx.coordinator.retention.reaper import Reaper, limits_of
from spmd_tx.coordinator.runtime.at_work import AtWork
from spmd_tx.coordinator.sampling.bank import VersionBank
from spmd_tx.coordinator.sampling.batch import SampleBatch, SamplingLimits
from spmd_tx.coordinator.sampling.job import SamplingModel
from spmd_tx.coordinator.sampling.progress import Progress
from spmd_tx.coordinator.sampling.routing_notes import RoutingFiles
from spmd_tx.coordinator.sampling.shapes import SamplingShapes
from spmd_tx.coordinator.sampling.stability_notes import StabilityFiles
from spmd_tx.coordinator.sampling.versions import open_versions
from spmd_tx.coordinator.scheduler.dispatcher import Workers
from spmd_tx.coordinator.scheduler.generation import GenerationParts
from spmd_tx.coordinator.scheduler.scheduler import Scheduler
from spmd_tx.coordinator.scheduler.warm_up_menu import program_menu
from spmd_tx.coordinator.server.health import ServerHealth
from spmd_tx.coordinator.server.preflight import check_mesh, check_pages, context_length
from spmd_tx.coordinator.server.worker_setup import bank_slots, make_setup
from spmd_tx.coordinator.storage.database import Database, open_database
from spmd_tx.coordinator.storage.disk import DiskGuard
from spmd_tx.coordinator.storage.outages import retry_through_outages
from spmd_tx.coordinator.storage.tables import ServerState
from spmd_tx.coordinator.tenancy.keyring import open_keyring
from spmd_tx.coordinator.text.model_text import LazyModelText, load_model_text
from spmd_tx.coordinator.text.prompt_texts import PromptTexts
from spmd_tx.coordinator.training.custom_loss_catalog import CustomLossCatalog
from spmd_tx.coordinator.training.custom_loss_runs import LossRuns, loss_limits
from spmd_tx.coordinator.training.execute import Training
from spmd_tx.coordinator.training.packing import TrainingShapes, attention_share
from spmd_tx.coordinator.training.slots import TrainingSlots
from spmd_tx.coordinator.wire.limits import Limits
from spmd_tx.errors import DatabaseDamaged
from spmd_tx.models.config import ModelConfig, read_model_config
from spmd_tx.protocol.memory_plan import MemoryPlan
from spmd_tx.protocol.programs import ProgramShape


async def next_generation(database: Database) -> int:
    """A number that no generation has had, so that messages of older ones are told apart."""
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
class ServedModel:
    """The base model, as far as the coordinator needs to know it."""

    directory: Path
    config: ModelConfig
    max_context: int  # tokens
    text: LazyModelText


@dataclass(frozen=True)
class Parts:
    """Everything that runs in the coordinator but HTTP and the worker processes."""

    services: Services
    scheduler: Scheduler
    hub: Hub
    health: ServerHealth
    generations: Generations
    wishes: OperatorsWishes


def open_model(config: ServerConfig) -> ServedModel:
    """Find the model and see that the configuration fits it. Blocks."""
    directory = find_model(config.base_model)
    model = read_model_config(directory)
    check_mesh(config, model)
    return ServedModel(
        directory=directory,
        config=model,
        max_context=context_length(config, model),
        text=LazyModelText(partial(load_model_text, directory)),
    )


async def open_parts(
    config: ServerConfig, model: ServedModel, port: WorkerPort, stack: AsyncExitStack
) -> Parts:
    """Open database and files, and connect everything; the stack closes them."""
    database = await open_database(config.database_url, config.data_dir)
    stack.push_async_callback(database.close)
    storage = DiskGuard(config.data_dir, config.min_free_disk)
    queue = await open_queue(database, config.data_dir, storage)
    stack.callback(queue.close)
    reaper = Reaper(database, config.data_dir, limits_of(config), queue.files_to_be)
    await reaper.reap(at_rest=True)
    catalog = await open_catalog(database)
    checkpoints = await open_checkpoints(
        database,
        config.checkpoints_dir,
        config.model_name,
        storage,
        await asyncio.to_thread(open_store, config),
        config.bounds.checkpoint_bytes,
    )
    hub = Hub(port.send)
    roster = AgentRoster(port.send, config.num_processes, config.devices_per_process)
    plan = Plan(
        setup=make_setup(config, model.directory, model.max_context),
        devices=config.devices_per_process,
        model_files=await asyncio.to_thread(fingerprint, model.directory),
        command_timeout=config.command_timeout,
        next_number=partial(next_generation, database),
    )

    snapshots = Snapshots(
        database,
        config.data_dir / "snapshots",
        config.snapshot_seconds,
        clock=asyncio.get_running_loop().time,
    )
    progress = Progress()
    custom_losses = CustomLossCatalog(database, queue)
    equip = partial(make_equipment, config, model, catalog, checkpoints, snapshots, custom_losses, progress)
    quarantine = await open_quarantine(database, config.data_dir)
    equip = partial(equip, at_work=quarantine.at_work)
    clock = asyncio.get_running_loop().time
    scheduler = Scheduler(queue, catalog, snapshots, equip, clock, quarantine)
    reaper.retire = scheduler.retire
    health = ServerHealth(hub)
    scheduler.phase = lambda: health.phase
    prompt_texts = PromptTexts(model.directory, model.text, model.max_context, config.bounds)
    stack.push_async_callback(prompt_texts.close)
    services = Services(
        config=config,
        model=model.config,
        max_context=model.max_context,
        tokenizer_id=str(model.directory) if Path(config.base_model).is_dir() else config.base_model,
        database=database,
        catalog=catalog,
        checkpoints=checkpoints,
        copies=CheckpointCopies(checkpoints, queue),
        queue=queue,
        scheduler=scheduler,
        health=health,
        storage=storage,
        reaper=reaper,
        keyring=await open_keyring(database, config.data_dir),
        signed_urls=await asyncio.to_thread(open_signed_urls, config.data_dir),
        traces=TraceExports(database, config.data_dir),
        quotas=Quotas(database, catalog, queue, config.bounds),
        text=model.text,
        prompt_texts=prompt_texts,
        progress=progress,
        implicit_samplers=ImplicitSamplers(catalog, config.model_name),
        notices=Notices(),
        body_rooms=make_rooms(config.bounds),
        polls=Polls(config.bounds.polls),
        line_numbers=LineNumbers(database, config.bounds.seq_ids_ahead),
    )
    wishes = OperatorsWishes(database, queue, scheduler)
    return Parts(services, scheduler, hub, health, Generations(port, hub, roster, plan), wishes)


def open_store(config: ServerConfig) -> CheckpointStore:
    """Where named checkpoints are. Blocks. Raises StartError."""
    base = config.checkpoints_base
    if base is None or "://" not in base:
        return LocalStore(config.checkpoints_dir)
    cache = CheckpointCache(config.checkpoints_dir, parse_size(config.max_checkpoint_cache, whole=0))
    return open_remote_store(base, config.data_dir, cache)


def make_equipment(
    config: ServerConfig,
    model: ServedModel,
    catalog: Catalog,
    checkpoints: CheckpointCatalog,
    snapshots: Snapshots,
    custom_losses: CustomLossCatalog,
    progress: Progress,
    workers: Workers,
    plan: MemoryPlan,
    at_work: AtWork | None = None,
) -> GenerationParts:
    """What one generation of workers, which hold nothing yet, is driven with. The model's text is loaded."""
    check_pages(plan.pages, config.page_size, model.max_context)
    bank = VersionBank(bank_slots(config), config.data_dir / "versions")
    versions = open_versions(catalog, checkpoints, bank, config.data_dir / "versions", config.max_lora_rank)
    training = Training(
        checkpoints=checkpoints,
        samplers=catalog,
        versions=versions,
        slots=TrainingSlots(config.max_lora_adapters),
        limits=Limits(model.config.vocab_size, model.max_context, config.max_lora_rank, config.bounds),
        shapes=training_shapes(config, model.config, model.max_context, plan),
        base_model=config.model_name,
        snapshots=snapshots,
        stability=StabilityFiles(config.data_dir),
        custom_losses=custom_losses,
        loss_runs=LossRuns(loss_limits(config.bounds)),
        routing=RoutingFiles(config.data_dir) if model.config.n_experts else None,
    )
    shapes = sampling_shapes(config, model.max_context, plan.decode_rows)
    limits = SamplingLimits(shapes=shapes, pages_per_shard=plan.pages, decode_steps=config.decode_steps)
    text = model.text.loaded
    sampling_model = SamplingModel(model.config, model.max_context, text.tokenizer, text.eos_token_ids)
    ahead = make_menu(config, model.config, model.max_context, plan) if config.warm_up == "background" else []
    orders = ProgramOrders(program for program in ahead if program not in workers.avoided)
    batch = SampleBatch(sampling_model, bank, limits, progress.hear, at_work, orders)
    return GenerationParts(workers, training, versions, batch, Compilation(workers, orders))


def sampling_shapes(config: ServerConfig, max_context: int, decode_rows: int) -> SamplingShapes:
    """The sizes of sampling commands."""
    return SamplingShapes(config.data_shards, max_context, config.page_size, decode_rows)


def training_shapes(
    config: ServerConfig, model: ModelConfig, max_context: int, plan: MemoryPlan
) -> TrainingShapes:
    """The sizes of training commands."""
    return TrainingShapes(config.data_shards, plan.train_tokens, max_context, attention_share(model))


def make_menu(
    config: ServerConfig, model: ModelConfig, max_context: int, plan: MemoryPlan
) -> list[ProgramShape]:
    """What is to be compiled ahead of need."""
    shapes = training_shapes(config, model, max_context, plan)
    return program_menu(shapes, sampling_shapes(config, max_context, plan.decode_rows), bank_slots(config))
