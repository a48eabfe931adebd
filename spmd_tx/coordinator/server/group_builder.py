"""Composes one group of workers from its configuration."""

import asyncio
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, get_args

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.agent.agent import Agent, AgentOptions
from spmd_tx.coordinator.bases.bases import Bases
from spmd_tx.coordinator.bases.health import GroupHealth, GroupPhase, role_of
from spmd_tx.coordinator.bases.served_base import ServedBase
from spmd_tx.coordinator.checkpoints.snapshots import Snapshots
from spmd_tx.coordinator.groups.group import WorkerGroup
from spmd_tx.coordinator.groups.of_base import GroupsOfBase
from spmd_tx.coordinator.groups.router import key_of
from spmd_tx.coordinator.http.services import Stores
from spmd_tx.coordinator.mesh.device_shares import DeviceShares
from spmd_tx.coordinator.mesh.generations import Generations
from spmd_tx.coordinator.mesh.hub import Hub
from spmd_tx.coordinator.mesh.loss_signs import LossSigns
from spmd_tx.coordinator.mesh.port import WorkerPort
from spmd_tx.coordinator.mesh.program_uses import ProgramUses
from spmd_tx.coordinator.mesh.roster import AgentRoster
from spmd_tx.coordinator.requests.quarantine import Quarantine
from spmd_tx.coordinator.runtime import metrics
from spmd_tx.coordinator.sampling.progress import SampleProgress
from spmd_tx.coordinator.scheduler.scheduler import ScheduledGroup, Scheduler
from spmd_tx.coordinator.server.generation_builder import GenerationBuilder, make_plan
from spmd_tx.coordinator.server.mesh_choice import MeshChoice
from spmd_tx.coordinator.server.served_model import OpenedModel
from spmd_tx.coordinator.training.custom_loss_catalog import CustomLossCatalog
from spmd_tx.coordinator.training.custom_loss_runs import LossRuns, loss_limits
from spmd_tx.durable_files import make_folder


class OpenedGroup(NamedTuple):
    """Holds a group's options, the base model that was found for it, and what its groups share."""

    config: ServerConfig
    model: OpenedModel
    base: ServedBase
    beside: GroupsOfBase


@dataclass(frozen=True)
class WorkerAccess:
    """Holds how workers and their agents reach the coordinator, and what they are."""

    port: WorkerPort
    secret: str
    worker: Sequence[str]  # what Python runs as a worker


@dataclass(frozen=True, kw_only=True)
class SharedParts:
    """Holds what all groups use."""

    workers: WorkerAccess
    stores: Stores
    bases: Bases
    quarantine: Quarantine
    progress: SampleProgress
    devices: DeviceShares  # of all hosts
    contexts_of: Callable[[Iterable[str]], tuple[str, ...]]  # the traceparents of requests


def _share_devices(config: ServerConfig, count: int | None, shares: DeviceShares) -> None:
    """Deal the devices of this host to the workers of a group; groups are opened in their order.

    ``count`` is of each worker; None: it is known later, and then they take what is free.
    """
    host = socket.gethostname()
    for process in range(config.agents_here):
        shares.expect(host, config.group)
        if count is not None:
            shares.take(host, (config.group, process), count)


async def open_group(opened: OpenedGroup, shared: SharedParts) -> WorkerGroup:
    """Connect the parts of a group. Raises StartError if its work cannot go on with this configuration."""
    config, model, base, beside = opened
    metrics.show_group(config.group)
    stores, workers = shared.stores, shared.workers
    clock = asyncio.get_running_loop().time
    snapshots = Snapshots(stores.database, config.data_dir / "snapshots", config.snapshot_seconds, clock)
    loss_runs = LossRuns(loss_limits(config.bounds))
    mesh = await asyncio.to_thread(MeshChoice, config, model.directory)
    await asyncio.to_thread(make_folder, config.group_dir)
    uses = await asyncio.to_thread(ProgramUses, config.group_dir / "program_uses.json")
    builder = GenerationBuilder(
        mesh=mesh,
        base=base,
        catalog=stores.catalog,
        checkpoints=stores.checkpoints,
        store=beside.store,
        snapshots=snapshots,
        custom_losses=CustomLossCatalog(stores.database, stores.queue),
        loss_runs=loss_runs,
        progress=shared.progress,
        at_work=shared.quarantine.at_work,
        uses=uses,
    )
    hub = Hub(workers.port.send, snapshots.writes.take, loss_runs.take, shared.contexts_of)
    health = GroupHealth(config.group, base.name, base.key, role_of(config), hub.record)
    signs = LossSigns()
    plan = await make_plan(mesh, model, stores.database)
    _share_devices(config, plan.devices or config.worker_devices, shared.devices)
    roster = AgentRoster(
        workers.port.send,
        config.num_processes,
        plan.devices,
        signs.add,
        group=config.group,
        shares=shared.devices,
    )
    scheduled = ScheduledGroup(
        takes=lambda request: (
            key_of(request, shared.bases) == base.key
            and beside.home(request) == config.group
            and not beside.holds(request)
        ),
        trains=lambda row: shared.bases.key_of_row(row.base_model) == base.key,
        phase=lambda: health.phase,
        siblings=beside.siblings,
    )
    scheduler = Scheduler(
        stores.queue, stores.catalog, snapshots, builder.make, clock, shared.quarantine, scheduled
    )
    metrics.GROUP_WAITING_TOKENS.labels(config.group).set_function(lambda: scheduler.waiting_tokens)
    metrics.follow_state(config.group, get_args(GroupPhase), lambda: health.state)
    if model.numbers is not None and config.trains == base.is_trainable:
        steps, ranks = await scheduler.steps_to_run_again(), await stores.catalog.ranks()
        await asyncio.to_thread(model.numbers.settle, steps, ranks)
    group = WorkerGroup(
        name=config.group,
        config=config,
        base=base,
        beside=beside,
        hub=hub,
        generations=Generations(hub, roster, signs, plan, may_be_killed=beside.can_do_without(config.group)),
        scheduler=scheduler,
        uses=uses,
        health=health,
        agents=[
            Agent(
                AgentOptions(workers.port.local_address, process, workers.secret, group=config.group),
                workers.worker,
            )
            for process in range(config.agents_here)
        ],
    )
    beside.add(group)
    return group
