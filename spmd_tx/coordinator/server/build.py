"""Builds the coordinator's parts from the configuration, and connects them."""

import asyncio
import os
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.bases.health import ServerHealth
from spmd_tx.coordinator.catalog.catalog import open_catalog
from spmd_tx.coordinator.checkpoints.catalog import open_checkpoints
from spmd_tx.coordinator.checkpoints.remote_store import open_store
from spmd_tx.coordinator.groups.group import WorkerGroup
from spmd_tx.coordinator.groups.late_groups import LateGroups
from spmd_tx.coordinator.groups.router import Router
from spmd_tx.coordinator.http.services import Backend, Services, Stores, open_services
from spmd_tx.coordinator.mesh.device_shares import DeviceShares
from spmd_tx.coordinator.mesh.reception import Reception
from spmd_tx.coordinator.requests.given_up import GivenUpWatcher
from spmd_tx.coordinator.requests.logged_images import LoggedImages
from spmd_tx.coordinator.requests.quarantine import open_quarantine
from spmd_tx.coordinator.requests.queue import open_queue
from spmd_tx.coordinator.retention.reaper import Reaper
from spmd_tx.coordinator.sampling.progress import SampleProgress
from spmd_tx.coordinator.server.group_builder import SharedParts, WorkerAccess, open_group
from spmd_tx.coordinator.server.late_opening import LateOpening, bases_of, sort_groups
from spmd_tx.coordinator.server.open_bases import OpenBases
from spmd_tx.coordinator.server.served_model import OpenedModel
from spmd_tx.coordinator.server.telemetry import Telemetry, open_telemetry
from spmd_tx.coordinator.storage.database import open_database
from spmd_tx.coordinator.storage.disk import DiskGuard
from spmd_tx.errors import UnreadableModel


@dataclass(frozen=True)
class Parts:
    """Holds everything that runs in the coordinator but the HTTP server."""

    services: Services
    groups: Sequence[WorkerGroup]  # late ones come to them
    late: LateGroups
    router: Router
    reception: Reception
    health: ServerHealth
    given_up: GivenUpWatcher


async def open_parts(
    config: ServerConfig,
    models: Sequence[OpenedModel | UnreadableModel],
    workers: WorkerAccess,
    stack: AsyncExitStack,
) -> Parts:
    """Open the database and files, and connect everything; the stack closes them.

    ``models`` are those of all groups, in their order, or why they cannot be read.
    """
    telemetry = await asyncio.to_thread(open_telemetry, os.environ)
    if telemetry is not None:
        stack.push_async_callback(asyncio.to_thread, telemetry.close)
    stores = await open_stores(config, stack, telemetry)
    images = LoggedImages(stores.database, config.data_dir / "payloads")
    open_bases = OpenBases(config, stores.queue, images, stack)
    opened, late = await sort_groups(config, models, open_bases)
    bases = await bases_of(config, opened, late)

    def contexts_of(requests: Iterable[str]) -> tuple[str, ...]:
        return () if telemetry is None else telemetry.contexts(stores.queue.unfinished_of(requests))

    shared = SharedParts(
        workers=workers,
        stores=stores,
        bases=bases,
        quarantine=await open_quarantine(stores.database, config.data_dir),
        progress=SampleProgress(),
        devices=DeviceShares(),
        contexts_of=contexts_of,
    )
    groups = [await open_group(each, shared) for each in opened]
    router = Router(stores.queue, bases, {group.base.key: group.beside for group in groups})
    by_name = {each.health.name: each.health for each in (*groups, *late)}
    health = ServerHealth([by_name[each.group] for each in config.all_groups])
    generations = {group.name: group.generations for group in groups}
    reception = Reception(workers.port, generations, {each.config.group: each.joined for each in late})
    backend = Backend(scheduler=router, health=health, progress=shared.progress)
    return Parts(
        services=await open_services(config, bases, stores, backend, stack),
        groups=groups,
        late=LateGroups(late, LateOpening(shared, groups, router, reception, health, open_bases).open),
        router=router,
        reception=reception,
        health=health,
        given_up=GivenUpWatcher(stores.database, stores.queue, router.give_up),
    )


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
    reaper = Reaper(database, config.data_dir, config, queue.files_to_be)
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
