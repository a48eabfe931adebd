"""Builds the answers of the billing routes. Reads only."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Select, and_, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from spmd_tx.bounds import Bounds
from spmd_tx.byte_sizes import show_size
from spmd_tx.coordinator.storage.row_pieces import in_pieces
from spmd_tx.coordinator.storage.tables import CheckpointRow, ModelRow, SessionRow, StoredCheckpoint, UsageRow
from spmd_tx.coordinator.tenancy.callers import Caller, is_seen
from spmd_tx.coordinator.tenancy.usage import HOUR_SECONDS
from spmd_tx.coordinator.wire.moments import read_moment
from spmd_tx.coordinator.wire.page_room import PageRoom
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
ROWS_AT_ONCE = 200
WHOLE = 4  # pages that the answer to a client which knows no pages may have


Sessions = dict[str, SessionRow]  # by id
Events = Callable[[Any, SessionRow | None], Iterator[UsageEvent]]  # of a row of its session


class EventPage(NamedTuple):
    """Selects a part of the events."""

    offset: int | None = None  # None: all of them are wanted
    most_bytes: int = Bounds().answer_bytes


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


async def usage(
    db: AsyncSession, window: Window, caller: Caller, now: float, page: EventPage = EventPage()
) -> UsageResponse:
    """Return the usage that a caller may see, by the hour, then by tokens, most first.

    Raises InvalidRequest for a window with more than an answer holds, unless a page of it is asked for. In a
    page, storage comes behind tokens.
    """
    start, end = window.start.timestamp(), window.end.timestamp()
    rows = select(UsageRow).where(
        UsageRow.hour >= start, UsageRow.hour < end, is_seen(caller, UsageRow.owner)
    )
    stored = _stored(start, end, caller).order_by(StoredCheckpoint.number)
    gatherer = _Gatherer(page)
    queries: list[tuple[Select[Any], Events]] = [
        (rows.order_by(UsageRow.hour, UsageRow.line), _token_events),
        (stored, partial(_storage_events, window=window, now=now)),
    ]
    for query, events_of in queries:
        async with aclosing(in_pieces(db, query, ROWS_AT_ONCE)) as pieces:
            async for piece in pieces:
                usage_rows = [row for (row,) in piece]
                sessions = await gatherer.sessions_of(db, usage_rows)
                if not await asyncio.to_thread(gatherer.add, usage_rows, events_of, sessions):
                    return gatherer.page()
    return await asyncio.to_thread(gatherer.all)


class _Gatherer:
    """Gathers events until they are too many for an answer."""

    def __init__(self, page: EventPage) -> None:
        self._page = page
        self._room = PageRoom(page.most_bytes if page.offset is not None else WHOLE * page.most_bytes)
        self._seen = 0  # events, with those before the page
        self._events: list[UsageEvent] = []
        self._sessions: dict[str, SessionRow] = {}

    async def sessions_of(self, db: AsyncSession, rows: Sequence[UsageRow | StoredCheckpoint]) -> Sessions:
        ids = {row.session_id for row in rows if row.session_id}
        sessions = await db.scalars(select(SessionRow).where(SessionRow.id.in_(ids - self._sessions.keys())))
        return {id: each for id, each in self._sessions.items() if id in ids} | {
            each.id: each for each in sessions
        }

    def add(self, rows: Sequence[UsageRow | StoredCheckpoint], events_of: Events, sessions: Sessions) -> bool:
        """Add the events of some rows; return whether there was room for all of them. Blocks."""
        for row in rows:
            session = sessions.get(row.session_id or "")
            for event in events_of(row, session):
                self._seen += 1
                if self._seen <= (self._page.offset or 0):
                    continue
                if not self._takes(event, session):
                    self._seen -= 1
                    return False
        return True

    def _takes(self, event: UsageEvent, session: SessionRow | None) -> bool:
        is_new = session is not None and session.id not in self._sessions
        metadata = len(msgspec.json.encode(session.user_metadata)) if session and is_new else 0
        if not self._room.takes_bytes(len(msgspec.json.encode(event)) + metadata):
            return False
        self._events.append(event)
        if session is not None:
            self._sessions[session.id] = session
        return True

    def page(self) -> UsageResponse:
        """Return what there was room for. Raises InvalidRequest where all of it was asked for."""
        if self._page.offset is None:
            raise InvalidRequest(
                f"this usage takes more than {show_size(WHOLE * self._page.most_bytes)}; ask for fewer hours "
                "at a time, or send offset=0 and then each next_offset (the operator raises the limit "
                "answer_bytes)"
            )
        return self._response(self._seen)

    def all(self) -> UsageResponse:
        """Return everything, in its order. Blocks."""
        if self._page.offset is None:
            by_hour = defaultdict[datetime, list[UsageEvent]](list)
            for event in self._events:
                by_hour[event.bucket_start].append(event)
            # Hour by hour: sorting all at once would hold up other threads.
            self._events = [event for hour in sorted(by_hour) for event in sorted(by_hour[hour], key=_tokens)]
        return self._response(None)

    def _response(self, next_offset: int | None) -> UsageResponse:
        metadata = {id: UsageSession(as_texts(each.user_metadata)) for id, each in self._sessions.items()}
        return UsageResponse(self._events, metadata, next_offset=next_offset)


async def current_storage(
    db: AsyncSession, project_id: str | None, caller: Caller, most_bytes: int = Bounds().answer_bytes
) -> StorageResponse:
    """Return the storage that a caller may see, by owner and by the present project of the run's session.

    Raises InvalidRequest where these are too many for an answer.
    """
    groups = SessionRow.project_id, CheckpointRow.owner
    query = (
        select(*groups, func.count(), func.sum(CheckpointRow.size_bytes))
        .select_from(CheckpointRow)
        .outerjoin(ModelRow, ModelRow.id == CheckpointRow.run_id)
        .outerjoin(SessionRow, SessionRow.id == ModelRow.session_id)
        .where(is_seen(caller, CheckpointRow.owner))
        .group_by(*groups)
    )
    if project_id is not None:
        query = query.where(SessionRow.project_id == project_id)
    room, items = PageRoom(WHOLE * most_bytes), list[StorageItem]()
    async with aclosing(in_pieces(db, query, ROWS_AT_ONCE)) as pieces:
        async for project, owner, count, size in (row async for piece in pieces for row in piece):
            item = StorageItem(project, owner, owner, count, int(size), int(size) / GIGABYTE)
            if not room.takes(item):
                raise InvalidRequest(
                    f"the storage of all projects takes more than {show_size(WHOLE * most_bytes)}; ask for "
                    "one of them with project_id (the operator raises the limit answer_bytes)"
                )
            items.append(item)
    return StorageResponse(items)


def _tokens(event: UsageEvent) -> int:
    """Return where an event is in its hour: most tokens first."""
    return -getattr(event.event_info, "token_count", 0)


def _stored(start: float, end: float, caller: Caller) -> Select[StoredCheckpoint]:
    is_there = or_(StoredCheckpoint.deleted_at.is_(None), StoredCheckpoint.deleted_at > start)
    query = select(StoredCheckpoint).where(and_(StoredCheckpoint.created_at < end, is_there))
    return query.where(is_seen(caller, StoredCheckpoint.owner))


def _token_events(row: UsageRow, session: SessionRow | None) -> Iterator[UsageEvent]:
    infos: list[tuple[int, EventInfo]] = [
        (row.trained, TrainingEvent(row.trained, forward_only=False)),
        (row.forwarded, TrainingEvent(row.forwarded, forward_only=True)),
        (row.prompt - row.cached, PrefillEvent(False, row.prompt - row.cached)),
        (row.cached, PrefillEvent(True, row.cached)),
        (row.sampled, SampleEvent(row.sampled)),
        (row.checkpoints, CheckpointEvent(row.checkpoints)),
    ]
    images = row.images
    for amount, info in infos:
        if amount:
            is_checkpoint = isinstance(info, CheckpointEvent)
            yield UsageEvent(
                **_envelope(row, session, row.hour),
                event_info=info,
                api_key_id=row.key_id,
                effective_rate_usd_per_million_tokens=None if is_checkpoint else COST,
                image_count=images,
            )
            images = 0


def _storage_events(
    row: StoredCheckpoint, session: SessionRow | None, window: Window, now: float
) -> Iterator[UsageEvent]:
    """One event for each past or present hour in which the checkpoint was there."""
    start = max(window.start.timestamp(), row.created_at)
    end = min(window.end.timestamp(), now, now if row.deleted_at is None else row.deleted_at)
    hour = int(start) // HOUR_SECONDS * HOUR_SECONDS
    while hour < end:
        hours = (min(end, hour + HOUR_SECONDS) - max(start, hour)) / HOUR_SECONDS
        yield UsageEvent(
            **_envelope(row, session, hour),
            event_info=StorageEvent(row.size_bytes / GIGABYTE * hours),
            api_key_id=session and session.key_id,
            effective_rate_usd_per_gigabyte_month=COST,
        )
        hour += HOUR_SECONDS


def _envelope(row: UsageRow | StoredCheckpoint, session: SessionRow | None, hour: int) -> dict[str, Any]:
    start = datetime.fromtimestamp(hour, UTC)
    return {
        "bucket_start": start,
        "bucket_end": start + timedelta(seconds=HOUR_SECONDS),
        "base_model": row.base_model,
        "user_id": row.owner,
        "user_name": row.owner,
        "session_id": row.session_id,
        "project_id": session and session.project_id,
        "training_run_id": row.run_id,
    }
