"""Searches sessions, newest first, page by page. Reads only."""

from collections.abc import Callable, Sequence
from contextlib import aclosing
from datetime import UTC, datetime

from sqlalchemy import ColumnElement, false, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from spmd_tx.bounds import Bounds
from spmd_tx.coordinator.catalog.searched_page import SearchedPage, newest_first, of_owner
from spmd_tx.coordinator.storage.database import Database
from spmd_tx.coordinator.storage.tables import CheckpointRow, ModelRow, SessionRow
from spmd_tx.coordinator.tenancy.callers import Caller, is_seen
from spmd_tx.coordinator.wire.limits import DEFAULT_BOUNDS
from spmd_tx.coordinator.wire.moments import write_moment
from spmd_tx.coordinator.wire.sessions import (
    Active,
    ActiveQuery,
    ClientFinished,
    ClientFinishedQuery,
    FinishedFor,
    SessionSearchCursor,
    SessionSearchRequest,
    SessionSearchResponse,
    SessionSummary,
    StatusQuery,
    as_texts,
)

Status = Active | ClientFinished | None
SilentSeconds = Callable[[str], float | None]


async def search(
    database: Database,
    request: SessionSearchRequest,
    caller: Caller,
    bounds: Bounds = DEFAULT_BOUNDS,
    silent_seconds: SilentSeconds = lambda session_id: None,
) -> SessionSearchResponse:
    """Find one page, which may be short, or even empty, where the search takes long.

    Names and metadata are compared here, since databases differ in case and JSON. ``silent_seconds`` says of
    an open session for how long its client has been silent, if that is unusual.
    """
    page = SearchedPage[SessionRow](request.limit, bounds)

    def summary(session: SessionRow, checkpoints: int, size: int) -> SessionSummary:
        return _summary(session, _status(session, silent_seconds), checkpoints, size)

    query = select(SessionRow).where(*_conditions(request, caller))
    cursor = request.cursor and (request.cursor.last_created_at, request.cursor.last_session_id)
    async with database.reading() as db:
        async with aclosing(newest_first(db, query, SessionRow, SessionRow.id, cursor)) as candidates:
            async for session in candidates:
                entry = summary(session, 0, 0) if _is_wanted(session, request) else None
                if not page.look_at(session, entry):
                    break
        saved = await _saved(db, [session.id for session in page.matches])
    last = page.last
    return SessionSearchResponse(
        [summary(session, *saved.get(session.id, (0, 0))) for session in page.matches],
        last and SessionSearchCursor(write_moment(last.created_at), last.id),
    )


def _conditions(request: SessionSearchRequest, caller: Caller) -> list[ColumnElement[bool]]:
    conditions = [is_seen(caller, SessionRow.owner), *of_owner(request.owner, SessionRow.owner, caller)]
    if request.project_ids is not None:
        conditions.append(func.coalesce(SessionRow.project_id, "").in_(request.project_ids))
    if request.session_id is not None and request.display_name is None:
        conditions.append(SessionRow.id == request.session_id)
    if request.statuses is not None:
        conditions.append(or_(false(), *map(_has_status, request.statuses)))
    return conditions


def _has_status(status: StatusQuery) -> ColumnElement[bool]:
    if isinstance(status, ActiveQuery):
        return SessionRow.ended_at.is_(None)
    if isinstance(status, ClientFinishedQuery):
        reason = SessionRow.finish_reason
        return reason.is_not(None) if status.reasons is None else reason.in_(status.reasons)
    return false()


def _is_wanted(session: SessionRow, request: SessionSearchRequest) -> bool:
    if request.display_name is not None and session.id != request.session_id:
        name = (session.display_name or "").casefold()
        if not all(word in name for word in request.display_name.casefold().split()):
            return False
    metadata = as_texts(session.user_metadata) or {}
    return request.user_metadata.items() <= metadata.items()


async def _saved(db: AsyncSession, session_ids: Sequence[str]) -> dict[str, tuple[int, int]]:
    """The number of checkpoints of each session, and their bytes."""
    query = (
        select(ModelRow.session_id, func.count(), func.sum(CheckpointRow.size_bytes))
        .join(CheckpointRow, CheckpointRow.run_id == ModelRow.id)
        .where(ModelRow.session_id.in_(session_ids))
        .group_by(ModelRow.session_id)
    )
    return {session_id: (count, int(size)) for session_id, count, size in await db.execute(query)}


def _summary(session: SessionRow, status: Status, checkpoints: int, size: int) -> SessionSummary:
    return SessionSummary(
        session_id=session.id,
        created_at=datetime.fromtimestamp(session.created_at, UTC),
        owner=session.owner,
        project_id=session.project_id or "",
        status=status,
        checkpoints_count=checkpoints,
        checkpoint_storage_bytes=size,
        display_name=session.display_name,
        user_metadata=as_texts(session.user_metadata),
    )


def _status(session: SessionRow, silent_seconds: SilentSeconds) -> Status:
    if session.ended_at is None:
        return Active(silent_seconds(session.id))
    if session.finish_reason is None:
        return None
    return ClientFinished(FinishedFor(session.finish_reason), session.finish_detail)
