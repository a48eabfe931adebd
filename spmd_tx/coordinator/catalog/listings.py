"""Builds the answers of the listing routes, newest first, in pages of bounded size. Reads only."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from sqlalchemy import ColumnElement, Select, and_, func, or_, select, true
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import defer

from spmd_tx.coordinator.storage.database import Database
from spmd_tx.coordinator.storage.row_pieces import in_pieces
from spmd_tx.coordinator.storage.tables import Checkpoint, Model, RequestRow, Sampler, Session
from spmd_tx.coordinator.tenancy.callers import Caller, is_seen
from spmd_tx.coordinator.wire.checkpoint_paths import EXTERNAL_WEIGHTS, SAMPLER_WEIGHTS, WEIGHTS
from spmd_tx.coordinator.wire.checkpoints import Checkpoint as WireCheckpoint
from spmd_tx.coordinator.wire.checkpoints import (
    CheckpointsResponse,
    CheckpointType,
    Cursor,
    TrainingRun,
    TrainingRunsResponse,
)
from spmd_tx.coordinator.wire.page_room import PageRoom
from spmd_tx.coordinator.wire.sessions import SessionResponse, SessionsResponse, as_texts

MAX_PAGE = 1000
MAX_OFFSET = 2**63 - 1  # of the databases
ROWS_AT_ONCE = 20  # with metadata of 64 KiB each
IDS_AT_ONCE = 1000

NEWEST_FIRST = (Checkpoint.created_at.desc(), Checkpoint.number.desc())

Entry = TypeVar("Entry", bound=msgspec.Struct)

AccessScope = Literal["owned", "accessible"]

TYPES: dict[str, CheckpointType] = {
    WEIGHTS: "training",
    SAMPLER_WEIGHTS: "sampler",
    EXTERNAL_WEIGHTS: "external",
}


class Page(NamedTuple):
    """Selects a part of a listing."""

    offset: int
    limit: int

    def clamped(self) -> "Page":
        offset = min(max(self.offset, 0), MAX_OFFSET)
        return Page(offset, min(max(self.limit, 1), MAX_PAGE))


class Which(NamedTuple):
    """Selects among the sessions that a caller may see."""

    access_scope: AccessScope = "accessible"
    project_id: str | None = None  # None: any project, or none

    def of(self, caller: Caller) -> ColumnElement[bool]:
        """The condition on ``Session``."""
        is_own = true() if self.access_scope == "accessible" else Session.owner == caller.owner
        is_in = true() if self.project_id is None else Session.project_id == self.project_id
        return and_(is_seen(caller, Session.owner), is_own, is_in)


async def sessions(database: Database, page: Page, caller: Caller, which: Which) -> SessionsResponse:
    offset, limit = page.clamped()
    newest_first = (Session.created_at.desc(), Session.id)
    query = select(Session.id).where(which.of(caller)).order_by(*newest_first)
    async with database.reading() as db:
        return SessionsResponse(list(await db.scalars(query.offset(offset).limit(limit))))


async def session(database: Database, row: Session, offset: int, most: int) -> SessionResponse:
    """Describe a session with the IDs of its models and samplers from an offset on, ``most`` of either."""
    offset = Page(offset, most).clamped().offset
    async with database.reading() as db:
        ids = [await _ids_of(db, table, row.id, offset, most) for table in (Model, Sampler)]
    has_more = any(len(each) > most for each in ids)
    models, samplers = (each[:most] for each in ids)
    return SessionResponse(
        training_run_ids=models,
        sampler_ids=samplers,
        user_metadata=as_texts(row.user_metadata),
        display_name=row.display_name,
        next_offset=offset + most if has_more else None,
    )


async def _ids_of(
    db: AsyncSession, table: type[Model] | type[Sampler], session_id: str, offset: int, most: int
) -> list[str]:
    query = select(table.id).where(table.session_id == session_id).order_by(table.created_at, table.id)
    pieces = in_pieces(db, query.offset(offset).limit(most + 1), IDS_AT_ONCE)
    return [id for some in [piece async for piece in pieces] for (id,) in some]


async def training_runs(
    database: Database, page: Page, caller: Caller, which: Which, room: PageRoom
) -> TrainingRunsResponse:
    page = page.clamped()
    seen = select(Model.id).join(Session, Session.id == Model.session_id).where(which.of(caller))
    newest_first = Model.created_at.desc(), Model.id
    query = _with_newest().where(which.of(caller)).order_by(*newest_first)
    async with database.reading() as db:
        total = await _count(db, seen)
        wanted = query.offset(page.offset).limit(page.limit)
        runs = await _fitting(_training_runs(db, wanted), room)
    return TrainingRunsResponse(runs, _cursor(page, total, runs))


async def _fitting(entries: AsyncGenerator[Entry], room: PageRoom) -> list[Entry]:
    """Take entries until there is no more room for them."""
    found = list[Entry]()
    async with aclosing(entries):
        async for entry in entries:
            if not room.takes(entry):
                break
            found.append(entry)
    return found


def _cursor(page: Page, total: int, found: Sequence[object]) -> Cursor:
    """Say where a page is. Its limit is what it has, where it ends before its limit for lack of room."""
    is_cut = len(found) < min(page.limit, total - page.offset)
    return Cursor(page.offset, len(found) if is_cut else page.limit, total)


async def training_run(database: Database, model: Model) -> TrainingRun:
    async with database.reading() as db:
        (run,) = [run async for run in _training_runs(db, _with_newest().where(Model.id == model.id))]
    return run


async def run_checkpoints(
    database: Database, run_id: str, caller: Caller, offset: int, room: PageRoom
) -> CheckpointsResponse:
    """List the checkpoints of a run from an offset on. There is a cursor if these are not all."""
    of_run = Checkpoint.run_id == run_id, is_seen(caller, Checkpoint.owner), is_there()
    page = Page(Page(offset, 1).clamped().offset, MAX_OFFSET)
    found = await _checkpoints(database, select(Checkpoint).where(*of_run), page, room)
    assert found.cursor is not None
    is_all = len(found.checkpoints) == found.cursor.total_count
    return CheckpointsResponse(found.checkpoints) if is_all else found


async def sampler_checkpoints(database: Database, caller: Caller) -> Sequence[Checkpoint]:
    """Return the caller's newest checkpoints that can be sampled now, without their metadata."""
    query = select(Checkpoint).where(
        Checkpoint.kind == SAMPLER_WEIGHTS, is_there(), is_seen(caller, Checkpoint.owner)
    )
    query = query.options(defer(Checkpoint.user_metadata, raiseload=True))
    async with database.reading() as db:
        return (await db.scalars(query.order_by(*NEWEST_FIRST).limit(MAX_PAGE))).all()


async def checkpoints(database: Database, page: Page, caller: Caller, room: PageRoom) -> CheckpointsResponse:
    seen = select(Checkpoint).where(is_seen(caller, Checkpoint.owner), is_there())
    return await _checkpoints(database, seen, page.clamped(), room)


async def _checkpoints(
    database: Database, query: Select[Checkpoint], page: Page, room: PageRoom
) -> CheckpointsResponse:
    async def entries(db: AsyncSession) -> AsyncGenerator[WireCheckpoint]:
        wanted = query.order_by(*NEWEST_FIRST).offset(page.offset).limit(page.limit)
        async with aclosing(in_pieces(db, wanted, ROWS_AT_ONCE)) as pieces:
            async for some in pieces:
                for (row,) in some:
                    yield on_the_wire(row)

    async with database.reading() as db:
        total = await _count(db, query.with_only_columns(Checkpoint.number))
        found = await _fitting(entries(db), room)
    return CheckpointsResponse(found, _cursor(page, total, found))


def is_there() -> ColumnElement[bool]:
    """Whether a checkpoint has not expired; an expired one counts as gone even before it is deleted."""
    return or_(Checkpoint.expires_at.is_(None), Checkpoint.expires_at > time.time())


async def _count(db: AsyncSession, query: Select[Any]) -> int:
    return await db.scalar(select(func.count()).select_from(query.subquery())) or 0


def _with_newest() -> "Select[*tuple[Any, ...]]":
    """Select models, each with its owner, the time of its newest request, and its newest checkpoints."""
    request = select(RequestRow.created_at).where(RequestRow.line == Model.id)
    last_request = request.order_by(RequestRow.seq_id.desc()).limit(1).scalar_subquery()
    checkpoint = select(Checkpoint.number).where(Checkpoint.run_id == Model.id, is_there())
    newest = checkpoint.order_by(*NEWEST_FIRST).limit(1)
    last = [newest.where(Checkpoint.kind == kind).scalar_subquery() for kind in (WEIGHTS, SAMPLER_WEIGHTS)]
    return select(Model, Session.owner, last_request, *last).join(Session, Session.id == Model.session_id)


async def _training_runs(db: AsyncSession, query: "Select[*tuple[Any, ...]]") -> AsyncGenerator[TrainingRun]:
    async for some in in_pieces(db, query, ROWS_AT_ONCE):
        numbers = {number for _, _, _, *last in some for number in last if number is not None}
        found = await db.scalars(select(Checkpoint).where(Checkpoint.number.in_(numbers)))
        checkpoints = {row.number: on_the_wire(row) for row in found}
        for model, owner, last_request_time, weights, sampler_weights in some:
            yield TrainingRun(
                training_run_id=model.id,
                base_model=model.base_model,
                model_owner=owner,
                is_lora=model.rank > 0,
                lora_rank=model.rank,
                last_request_time=_rfc3339(last_request_time or model.created_at),
                corrupted=False,
                last_checkpoint=checkpoints.get(weights or 0),
                last_sampler_checkpoint=checkpoints.get(sampler_weights or 0),
                user_metadata=as_texts(model.user_metadata),
            )


def on_the_wire(row: Checkpoint) -> WireCheckpoint:
    return WireCheckpoint(
        checkpoint_id=f"{row.kind}/{row.name}",
        checkpoint_type=TYPES[row.kind],
        time=_rfc3339(row.created_at),
        tinker_path=row.tinker_path,
        size_bytes=row.size_bytes,
        public=row.is_public,
        user_metadata=as_texts(row.user_metadata),
        expires_at=None if row.expires_at is None else _rfc3339(row.expires_at),
        base_model=row.base_model,
    )


def _rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
