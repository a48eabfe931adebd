"""Builds the coordinator's parts from the configuration, and connects them."""

import asyncio
import os
from collections.abc import Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.bases.bases import Bases
from spmd_tx.coordinator.bases.served_base import open_base
from spmd_tx.coordinator.catalog.catalog import open_catalog
from spmd_tx.coordinator.checkpoints.catalog import open_checkpoints
from spmd_tx.coordinator.checkpoints.remote_store import open_store
from spmd_tx.coordinator.checkpoints.snapshots import Snapshots
from spmd_tx.coordinator.http.services import Backend, Services, Stores, open_services
from spmd_tx.coordinator.mesh.generations import Generations
from spmd_tx.coordinator.mesh.hub import Hub
from spmd_tx.coordinator.mesh.loss_signs import LossSigns
from spmd_tx.coordinator.mesh.port import WorkerPort
from spmd_tx.coordinator.mesh.program_uses import ProgramUses
from spmd_tx.coordinator.mesh.roster import AgentRoster
from spmd_tx.coordinator.requests.given_up import GivenUpWatcher
from spmd_tx.coordinator.requests.quarantine import open_quarantine
from spmd_tx.coordinator.requests.queue import open_queue
from spmd_tx.coordinator.retention.reaper import Reaper, limits_of
from spmd_tx.coordinator.sampling.progress import SampleProgress
from spmd_tx.coordinator.scheduler.scheduler import Scheduler
from spmd_tx.coordinator.server.generation_builder import GenerationBuilder, make_plan
from spmd_tx.coordinator.server.health import ServerHealth
from spmd_tx.coordinator.server.mesh_choice import MeshChoice
from spmd_tx.coordinator.server.served_model import OpenedModel
from spmd_tx.coordinator.server.telemetry import Telemetry, open_telemetry
from spmd_tx.coordinator.storage.database import open_database
from spmd_tx.coordinator.storage.disk import DiskGuard
from spmd_tx.coordinator.training.custom_loss_catalog import CustomLossCatalog
from spmd_tx.coordinator.training.custom_loss_runs import LossRuns, loss_limits


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
    config: ServerConfig, model: OpenedModel, port: WorkerPort, stack: AsyncExitStack
) -> Parts:
    """Open the database and files, and connect everything; the stack closes them."""
    clock = asyncio.get_running_loop().time
    telemetry = await asyncio.to_thread(open_telemetry, os.environ)
    if telemetry is not None:
        stack.push_async_callback(asyncio.to_thread, telemetry.close)
    stores = await open_stores(config, stack, telemetry)
    base = open_base(config, model, stack, history=model.history)
    database = stores.database
    snapshots = Snapshots(database, config.data_dir / "snapshots", config.snapshot_seconds, clock=clock)
    quarantine = await open_quarantine(database, config.data_dir)
    progress = SampleProgress()
    loss_runs = LossRuns(loss_limits(config.bounds))
    mesh = await asyncio.to_thread(MeshChoice, config, model.directory)
    uses = await asyncio.to_thread(ProgramUses, config.data_dir / "program_uses.json")
    builder = GenerationBuilder(
        mesh=mesh,
        base=base,
        catalog=stores.catalog,
        checkpoints=stores.checkpoints,
        snapshots=snapshots,
        custom_losses=CustomLossCatalog(database, stores.queue),
        loss_runs=loss_runs,
        progress=progress,
        at_work=quarantine.at_work,
        uses=uses,
    )

    def contexts_of(requests: Iterable[str]) -> tuple[str, ...]:
        return () if telemetry is None else telemetry.contexts(stores.queue.unfinished_of(requests))

    hub = Hub(port.send, snapshots.writes.take, loss_runs.take, contexts_of)
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
    backend = Backend(scheduler=scheduler, health=health, progress=progress)
    services = await open_services(config, Bases([base]), stores, backend, stack)
    given_up = GivenUpWatcher(database, stores.queue, scheduler)
    return Parts(services, scheduler, hub, health, generations, given_up, uses)


async def open_stores(
    config: ServerConfig, stack: AsyncExitStack, telemetry: Telemetry | None = None
) -> Stores:
    """Open the database and the data directory, and delete what is too old; the stack closes them."""
    database = await open_database(config.database_url, config.data_dir)
    stack.push_async_callback(database.close)
    disk = DiskGuard(config.data_dir, config.min_free_disk)
    hears_ends = [] if telemetry is None else [telemetry.ended]
    queue = await open_queue(database, config.data_dir, disk, *hears_ends)
    stack.callback(queue.close)
    reaper = Reaper(database, config.data_dir, limits_of(config), queue.files_to_be)
    await reaper.reap(at_rest=True)
    checkpoints = await open_checkpoints(
        database,
        await asyncio.to_thread(open_store, config),
        disk,
        config.bounds.checkpoint_bytes,
    )
    return Stores(
        database=database,
        storage=disk,
        queue=queue,
        reaper=reaper,
        catalog=await open_catalog(database),
        checkpoints=checkpoints,
    )
