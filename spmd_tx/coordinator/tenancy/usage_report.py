"""Builds the answers of the billing routes. Reads only."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from sqlalchemy import and_, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from spmd_tx.coordinator.storage.tables import Checkpoint, Model, Session, StoredCheckpoint, UsageRow
from spmd_tx.coordinator.tenancy.callers import Caller, is_seen
from spmd_tx.coordinator.tenancy.usage import HOUR_SECONDS
from spmd_tx.coordinator.wire.moments import read_moment
from spmd_tx.coordinator.wire.sessions import as_texts
from spmd_tx.coordinator.wire.usage import (
    CheckpointEvent,
    EventInfo,
    PrefillEvent,
    SampleEvent,
    StorageEvent,
    StorageItem,
    StorageResponse,
    TrainingEvent,
    UsageEvent,
    UsageResponse,
    UsageSession,
)
from spmd_tx.errors import InvalidRequest

MOST_DAYS = 14  # of one answer, as with the hosted service
GIGABYTE = 1e9
COST = 0.0


class Window(NamedTuple):
    """Holds a range of whole hours, UTC."""

    start: datetime
    end: datetime


def window(starting_on: str, ending_before: str) -> Window:
    """Read a window. Raises InvalidRequest unless it is made of whole hours, and not too many."""
    start, end = _hour("starting_on", starting_on), _hour("ending_before", ending_before)
    if not timedelta(0) < end - start <= timedelta(days=MOST_DAYS):
        raise InvalidRequest(f"ending_before must be up to {MOST_DAYS} days after starting_on")
    if start > datetime.now(UTC):
        raise InvalidRequest(f"starting_on is {starting_on}, which is in the future")
    return Window(start, end)


def _hour(name: str, text: str) -> datetime:
    moment = read_moment(name, text)
    if moment.timestamp() % HOUR_SECONDS:
        raise InvalidRequest(f"{name} is {text}; give a full hour with its offset from UTC")
    return moment


async def usage(db: AsyncSession, wanted: Window, caller: Caller, now: float) -> UsageResponse:
    """The usage that a caller may see, by the hour, then by tokens, most first."""
    start, end = wanted.start.timestamp(), wanted.end.timestamp()
    query = select(UsageRow).where(UsageRow.hour >= start, UsageRow.hour < end)
    rows = (await db.scalars(query.where(is_seen(caller, UsageRow.owner)))).all()
    stored = await _stored(db, start, end, caller)
    sessions = await _sessions(db, {row.session_id for row in (*rows, *stored) if row.session_id})
    events = [event for row in rows for event in _token_events(row, sessions)]
    events += [event for row in stored for event in _storage_events(row, wanted, now, sessions)]
    events.sort(key=lambda event: (event.bucket_start, -getattr(event.event_info, "token_count", 0)))
    metadata = {id: UsageSession(as_texts(session.user_metadata)) for id, session in sessions.items()}
    return UsageResponse(events, metadata)


async def current_storage(db: AsyncSession, project_id: str | None, caller: Caller) -> StorageResponse:
    """The storage that a caller may see, by owner and by the present project of the run's session."""
    groups = Session.project_id, Checkpoint.owner
    query = (
        select(*groups, func.count(), func.sum(Checkpoint.size_bytes))
        .select_from(Checkpoint)
        .outerjoin(Model, Model.id == Checkpoint.run_id)
        .outerjoin(Session, Session.id == Model.session_id)
        .where(is_seen(caller, Checkpoint.owner))
        .group_by(*groups)
    )
    if project_id is not None:
        query = query.where(Session.project_id == project_id)
    return StorageResponse(
        [
            StorageItem(project, owner, owner, count, int(size), int(size) / GIGABYTE)
            for project, owner, count, size in await db.execute(query)
        ]
    )


async def _stored(db: AsyncSession, start: float, end: float, caller: Caller) -> Sequence[StoredCheckpoint]:
    is_there = or_(StoredCheckpoint.deleted_at.is_(None), StoredCheckpoint.deleted_at > start)
    query = select(StoredCheckpoint).where(and_(StoredCheckpoint.created_at < end, is_there))
    return (await db.scalars(query.where(is_seen(caller, StoredCheckpoint.owner)))).all()


async def _sessions(db: AsyncSession, ids: set[str]) -> dict[str, Session]:
    found = await db.scalars(select(Session).where(Session.id.in_(ids)))
    return {session.id: session for session in found}


def _token_events(row: UsageRow, sessions: dict[str, Session]) -> Iterator[UsageEvent]:
    infos: list[tuple[int, EventInfo]] = [
        (row.trained, TrainingEvent(row.trained, forward_only=False)),
        (row.forwarded, TrainingEvent(row.forwarded, forward_only=True)),
        (row.prompt - row.cached, PrefillEvent(False, row.prompt - row.cached)),
        (row.cached, PrefillEvent(True, row.cached)),
        (row.sampled, SampleEvent(row.sampled)),
        (row.checkpoints, CheckpointEvent(row.checkpoints)),
    ]
    for amount, info in infos:
        if amount:
            is_checkpoint = isinstance(info, CheckpointEvent)
            yield UsageEvent(
                **_bucket(row.hour),
                **_envelope(row, sessions),
                event_info=info,
                api_key_id=row.key_id,
                effective_rate_usd_per_million_tokens=None if is_checkpoint else COST,
            )


def _storage_events(
    row: StoredCheckpoint, wanted: Window, now: float, sessions: dict[str, Session]
) -> Iterator[UsageEvent]:
    """One event for each past or present hour in which the checkpoint was there."""
    start = max(wanted.start.timestamp(), row.created_at)
    end = min(wanted.end.timestamp(), now, now if row.deleted_at is None else row.deleted_at)
    hour = int(start) // HOUR_SECONDS * HOUR_SECONDS
    session = sessions.get(row.session_id or "")
    while hour < end:
        hours = (min(end, hour + HOUR_SECONDS) - max(start, hour)) / HOUR_SECONDS
        yield UsageEvent(
            **_bucket(hour),
            **_envelope(row, sessions),
            event_info=StorageEvent(row.size_bytes / GIGABYTE * hours),
            api_key_id=session and session.key_id,
            effective_rate_usd_per_gigabyte_month=COST,
        )
        hour += HOUR_SECONDS


def _bucket(hour: int) -> dict[str, Any]:
    start = datetime.fromtimestamp(hour, UTC)
    return {"bucket_start": start, "bucket_end": start + timedelta(seconds=HOUR_SECONDS)}


def _envelope(row: UsageRow | StoredCheckpoint, sessions: dict[str, Session]) -> dict[str, Any]:
    session = sessions.get(row.session_id or "")
    return {
        "base_model": row.base_model,
        "user_id": row.owner,
        "user_name": row.owner,
        "session_id": row.session_id,
        "project_id": session and session.project_id,
        "training_run_id": row.run_id,
    }
