"""Builds the coordinator's parts from the configuration, and closes them again. Has no logic of its own."""

import asyncio
import shutil
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.bank import VersionBank
from spmd_tx.coordinator.broadcast import Hub
from spmd_tx.coordinator.catalog import open_catalog
from spmd_tx.coordinator.checkpoint_catalog import open_checkpoints
from spmd_tx.coordinator.database import open_database
from spmd_tx.coordinator.decoding import SampleBatch, SamplingLimits
from spmd_tx.coordinator.dependencies import Services
from spmd_tx.coordinator.health import ServerHealth
from spmd_tx.coordinator.model_files import find_model, load_tokenizer
from spmd_tx.coordinator.packing import Grid
from spmd_tx.coordinator.preflight import check_mesh, check_pages, context_length, free_port
from spmd_tx.coordinator.request_queue import open_queue
from spmd_tx.coordinator.samples import SamplingModel
from spmd_tx.coordinator.scheduler import Scheduler
from spmd_tx.coordinator.trained_model import TrainingSlots
from spmd_tx.coordinator.training import Training
from spmd_tx.coordinator.validation import Limits
from spmd_tx.coordinator.versions import open_versions
from spmd_tx.models.config import ModelConfig, read_model_config
from spmd_tx.protocol import Ready, Setup

GENERATION = 1


@dataclass(frozen=True)
class ServedModel:
    """The base model, as far as the coordinator needs to know it."""

    directory: Path
    config: ModelConfig
    max_context: int  # tokens
    tokenizer: Tokenizer


@dataclass(frozen=True)
class Parts:
    """Everything that runs in the coordinator but HTTP and the worker processes."""

    services: Services
    scheduler: Scheduler
    hub: Hub
    health: ServerHealth
    bank: VersionBank


def open_model(config: ServerConfig) -> ServedModel:
    """Find the model and see that the configuration fits it. Blocks."""
    directory = find_model(config.base_model)
    model = read_model_config(directory)
    check_mesh(config, model)
    return ServedModel(directory, model, context_length(config, model), load_tokenizer(directory))


def make_setup(config: ServerConfig, model: ServedModel) -> Setup:
    """What the workers are told."""
    return Setup(
        generation=GENERATION,
        num_processes=config.num_processes,
        jax_coordinator=f"127.0.0.1:{free_port()}",
        model_dir=str(model.directory),
        model_name=config.model_name,
        dtype=config.dtype,
        fsdp=config.fully_sharded_data_parallel_size,
        ep=config.expert_parallel_size,
        tp=config.tensor_parallel_size,
        adapter_slots=config.max_lora_adapters,
        bank_slots=config.sampler_slots + 2,  # the base model; and one that is free for the next save
        max_rank=config.max_lora_rank,
        max_context=model.max_context,
        page_size=config.page_size,
        kv_cache_tokens=config.kv_cache_tokens,
        decode_rows=config.decode_rows * config.data_shards,
        decode_steps=config.decode_steps,
        compilation_cache=str(config.data_dir / "compilation_cache"),
    )


async def open_parts(config: ServerConfig, model: ServedModel, stack: AsyncExitStack) -> Parts:
    """Open database and files, and connect everything; the stack closes them."""
    database = await open_database(config.database_url, config.data_dir)
    stack.push_async_callback(database.close)
    queue = await open_queue(database, config.data_dir)
    stack.callback(queue.close)
    catalog = await open_catalog(database)
    checkpoints = await open_checkpoints(database, config.checkpoints_dir, config.model_name)
    setup = make_setup(config, model)
    hub = Hub(setup)
    stack.callback(hub.close)

    versions_dir, scratch = config.data_dir / "versions", config.data_dir / "scratch"
    await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
    bank = VersionBank(setup.bank_slots, versions_dir)
    versions = open_versions(catalog, checkpoints, bank, versions_dir, config.max_lora_rank)
    training = Training(
        checkpoints=checkpoints,
        samplers=catalog,
        versions=versions,
        slots=TrainingSlots(config.max_lora_adapters),
        limits=Limits(model.config.vocab_size, model.max_context, config.max_lora_rank),
        grid=Grid(config.data_shards, config.train_tokens, model.max_context),
        base_model=config.model_name,
        scratch=scratch,
    )
    scheduler = Scheduler(queue, hub, training, versions, clock=asyncio.get_running_loop().time)
    health = ServerHealth(hub)
    services = Services(
        config=config,
        model=model.config,
        max_context=model.max_context,
        tokenizer_id=str(model.directory) if Path(config.base_model).is_dir() else config.base_model,
        database=database,
        catalog=catalog,
        checkpoints=checkpoints,
        queue=queue,
        scheduler=scheduler,
        health=health,
    )
    return Parts(services, scheduler, hub, health, bank)


def make_batch(config: ServerConfig, model: ServedModel, bank: VersionBank, ready: Ready) -> SampleBatch:
    """The sample batch, once it is known how many pages there are."""
    check_pages(ready.pages, config.page_size, model.max_context)
    limits = SamplingLimits(
        shards=config.data_shards,
        rows_per_shard=config.decode_rows,
        page_size=config.page_size,
        pages_per_shard=ready.pages,
        decode_steps=config.decode_steps,
        prefill_tokens=config.train_tokens,
    )
    return SampleBatch(SamplingModel(model.config, model.max_context, model.tokenizer), bank, limits)
