"""The route that shows an admin the state of the server: workers, programs, memory, tenants, disk."""

import asyncio
from importlib.metadata import version

from litestar import Controller

from spmd_tx.coordinator.bases.health import GroupHealth
from spmd_tx.coordinator.http.answer_guard import polled
from spmd_tx.coordinator.http.console import tenants
from spmd_tx.coordinator.http.services import ApiCall, Services
from spmd_tx.coordinator.requests import overview
from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.wire.console.server_page import (
    CompiledProgram,
    DeviceMemory,
    Disk,
    Generation,
    MemoryUse,
    ProgramProgress,
    ServerGroup,
    ServerPage,
    Suspect,
)
from spmd_tx.protocol import memory_plan
from spmd_tx.protocol.memory_plan import MemoryPlan

WINDOW_SECONDS = 300.0
MOST_SUSPECTS = 50


class ServerController(Controller):
    path = "/console/api/server"

    @polled("/")
    async def server(self, call: ApiCall) -> ServerPage:
        """Return the state of the server, for admins only."""
        call.check_admin("the state of the server is")
        return await call.services.shared_answers.get_costly("server", lambda: _page(call.services))


async def _page(services: Services) -> ServerPage:
    health, now = services.health, clock.now()
    work = tenants.WorkInWindow(services, now - WINDOW_SECONDS, now)
    by_owner, of_groups = await work.tenants(), work.of_groups()
    return ServerPage(
        version=version("spmd_tx"),
        started_at=min(group.record.started_at for group in health.groups),
        now=now,
        phase=health.phase,
        is_ready=health.ready,
        refusal=health.refusal,
        groups=[_group(group, of_groups[group.name]) for group in health.groups],
        window_seconds=WINDOW_SECONDS,
        tenants=by_owner,
        queue=work.queue(),
        queue_length=work.queue_length,
        throughput=await asyncio.to_thread(work.throughput),
        disk=Disk(services.storage.free_bytes, services.storage.bytes_by_kind, services.storage.problem),
        suspects=await _suspects(services),
    )


def _group(group: GroupHealth, work: tenants.WorkOfGroup) -> ServerGroup:
    record = group.record
    return ServerGroup(
        name=group.name,
        base_model=group.base,
        role=group.role,
        state=group.state,
        phase=group.phase,
        waiting=work.waiting,
        running=work.running,
        busy=work.busy,
        mesh=record.mesh,
        device=record.device,
        hosts=record.hosts,
        generations=[
            Generation(each.number, each.began_at, each.ready_at, each.ended_at, each.reason)
            for each in reversed(record.generations)
        ],
        programs=_programs(group),
        memory=None if record.plan is None else _memory(record.plan),
    )


def _programs(group: GroupHealth) -> ProgramProgress:
    now = group.programs
    recent = [CompiledProgram(*each) for each in reversed(group.record.programs)]
    if now is None:
        return ProgramProgress(0, 0, None, recent)
    return ProgramProgress(now.ready, now.planned, now.compiling, recent)


def _memory(plan: MemoryPlan) -> DeviceMemory:
    uses = [MemoryUse(*each) for each in memory_plan.uses(plan)]
    return DeviceMemory(plan.device_bytes, uses, memory_plan.choices(plan))


async def _suspects(services: Services) -> list[Suspect]:
    async with services.database.reading() as db:
        suspects = await overview.suspects(db, MOST_SUSPECTS)
    return [
        Suspect(
            id=each.row.id,
            kind=each.row.kind,
            line=each.row.line,
            owner=each.owner,
            state=each.state,
            losses=each.row.losses,
            coordinator_losses=each.row.coordinator_losses,
            reason=each.row.given_up or each.row.never_again,
        )
        for each in suspects
    ]
