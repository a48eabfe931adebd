"""Adds up the work of the last minutes, by owner and by time."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from sqlalchemy import select

from spmd_tx.coordinator.http.services import Services
from spmd_tx.coordinator.requests.runs.recent import SLICE_SECONDS, Timed
from spmd_tx.coordinator.storage.tables import SessionRow
from spmd_tx.coordinator.wire.console.server_page import Tenant, Throughput, UnfinishedRequest

TRAINING = frozenset({"forward", "forward_backward"})
KEYS_PER_QUERY = 500
MOST_UNFINISHED = 10  # since finding out why they wait takes a while
UNKNOWN = "?"  # the owner of a session that is not in the database any more


class WorkOfGroup(NamedTuple):
    """Counts the requests of a group."""

    waiting: int
    running: int
    busy: float  # share of the window


class WorkInWindow:
    """Holds the requests that were unfinished at some time in a window, and what devices worked on in it."""

    def __init__(self, services: Services, since: float, now: float) -> None:
        recent = services.queue.recent
        self._now = now
        self._services = services
        self._owners: dict[str, str] = {}  # by session
        self._ended = recent.ended_since(since)
        self._open = services.queue.at_work()
        first, last = int(max(since, recent.known_since) // SLICE_SECONDS), int(now // SLICE_SECONDS)
        self.queue_length = len(self._open)
        self._devices = {number: recent.devices(number * SLICE_SECONDS) for number in range(first, last + 1)}

    async def tenants(self) -> list[Tenant]:
        """List the owners with any work, those for whom devices worked longest first."""
        await self._find_owners()
        seconds = self._device_seconds()
        return await asyncio.to_thread(self._tenants, seconds)

    def _tenants(self, seconds: Mapping[str, float]) -> list[Tenant]:
        """Add up the requests of each owner. Takes a second where there are many; blocks."""
        by_owner = defaultdict[str, list[Timed]](list)
        for timed in (*self._ended, *self._open):
            by_owner[self._owners.get(timed.request.session_id, UNKNOWN)].append(timed)
        everybodys = sum(seconds.values()) or 1.0
        tenants = [
            self._tenant(owner, timed, seconds.get(owner, 0.0) / everybodys)
            for owner, timed in by_owner.items()
        ]
        return sorted(tenants, key=lambda tenant: (-tenant.device_share, tenant.owner))

    def queue(self) -> list[UnfinishedRequest]:
        """List the oldest unfinished requests. Call it after ``tenants``, which finds their owners."""
        return [self._unfinished(timed) for timed in self._open[:MOST_UNFINISHED]]

    def throughput(self) -> list[Throughput]:
        """List what was done in each slice; the last one is left out, as it is not over. Blocks."""
        tokens = defaultdict[tuple[int, bool], int](int)
        groups = len(self._services.health.groups)
        for timed in self._ended:
            is_training = timed.request.kind in TRAINING
            tokens[int((timed.finished_at or 0.0) // SLICE_SECONDS), is_training] += timed.tokens or 0
        return [
            Throughput(
                at=number * SLICE_SECONDS,
                trained=tokens[number, True] / SLICE_SECONDS,
                sampled=tokens[number, False] / SLICE_SECONDS,
                busy=min(1.0, devices.total / (SLICE_SECONDS * groups)),
            )
            for number, devices in list(self._devices.items())[:-1]
        ]

    def of_groups(self) -> dict[str, WorkOfGroup]:
        """Count what is unfinished of each group, and say how much of the window it worked. By name."""
        group_of, length = self._services.scheduler.group_of, SLICE_SECONDS * len(self._devices)
        counts = Counter((group_of(timed.request), timed.times.sent_at is None) for timed in self._open)
        work = dict[str, WorkOfGroup]()
        for group in self._services.health.groups:
            seconds = sum(devices.by_group.get(group.name, 0.0) for devices in self._devices.values())
            waiting, running = counts[group.name, True], counts[group.name, False]
            work[group.name] = WorkOfGroup(waiting, running, min(1.0, seconds / length))
        return work

    async def _find_owners(self) -> None:
        sessions = {timed.request.session_id for timed in (*self._ended, *self._open)}
        sessions |= {session for devices in self._devices.values() for session, _ in devices.by_line}
        ids = sorted(sessions)
        async with self._services.database.reading() as db:
            for start in range(0, len(ids), KEYS_PER_QUERY):
                some = SessionRow.id.in_(ids[start : start + KEYS_PER_QUERY])
                for session, owner in await db.execute(select(SessionRow.id, SessionRow.owner).where(some)):
                    self._owners[session] = owner

    def _unfinished(self, timed: Timed) -> UnfinishedRequest:
        request, times = timed.request, timed.times
        return UnfinishedRequest(
            id=request.id,
            kind=request.kind,
            line=request.line,
            owner=self._owners.get(request.session_id, UNKNOWN),
            seconds=self._now - times.accepted_at,
            is_running=times.sent_at is not None,
            reason=self._services.scheduler.status(request.id).reason,
        )

    def _device_seconds(self) -> dict[str, float]:
        by_owner = defaultdict[str, float](float)
        for devices in self._devices.values():
            for (session_id, _), seconds in devices.by_line.items():
                by_owner[self._owners.get(session_id, UNKNOWN)] += seconds
        return by_owner

    def _tenant(self, owner: str, requests: Sequence[Timed], device_share: float) -> Tenant:
        unfinished = [each for each in requests if each.finished_at is None]
        waiting = sum(each.times.sent_at is None for each in unfinished)
        oldest = min((each.times.accepted_at for each in unfinished), default=None)
        wait_seconds = [
            each.times.sent_at - each.times.accepted_at for each in requests if each.times.sent_at is not None
        ]
        return Tenant(
            owner=owner,
            waiting=waiting,
            running=len(unfinished) - waiting,
            oldest_seconds=None if oldest is None else self._now - oldest,
            finished=sum(each.finished_at is not None for each in requests),
            wait_median=median(wait_seconds) if wait_seconds else None,
            wait_most=max(wait_seconds, default=None),
            tokens=sum(each.tokens or 0 for each in requests),
            device_share=device_share,
        )
