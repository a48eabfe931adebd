"""Builds the answers of the listing routes, newest first, in pages of bounded size. Reads only."""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from sqlalchemy import ColumnElement, Select, and_, func, or_, select, true
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import defer

from spmd_tx.coordinator.storage.database import Database
from spmd_tx.coordinator.storage.row_pieces import in_pieces
from spmd_tx.coordinator.storage.tables import CheckpointRow, ModelRow, RequestRow, SamplerRow, SessionRow
from spmd_tx.coordinator.tenancy.callers import Caller, is_seen
from spmd_tx.coordinator.wire.checkpoint_paths import EXTERNAL_WEIGHTS, SAMPLER_WEIGHTS, WEIGHTS
from spmd_tx.coordinator.wire.checkpoints import (
    Checkpoint,
    CheckpointsResponse,
    CheckpointType,
    Cursor,
    TrainingRun,
    TrainingRunsResponse,
)
from spmd_tx.coordinator.wire.moments import write_moment
from spmd_tx.coordinator.wire.page_room import PageRoom
from spmd_tx.coordinator.wire.sessions import SessionResponse, SessionsResponse, as_texts

MAX_PAGE = 1000
MAX_OFFSET = 2**63 - 1  # of the databases
ROWS_AT_ONCE = 20  # with metadata of 64 KiB each
IDS_AT_ONCE = 1000

NEWEST_FIRST = (CheckpointRow.created_at.desc(), CheckpointRow.number.desc())

Entry = TypeVar("Entry", bound=msgspec.Struct)

AccessScope = Literal["owned", "accessible"]

TYPES: dict[str, CheckpointType] = {
    WEIGHTS: "training",
    SAMPLER_WEIGHTS: "sampler",
    EXTERNAL_WEIGHTS: "external",
}


class ListingPage(NamedTuple):
    """Selects a part of a listing."""

    offset: int
    limit: int

    def clamped(self) -> "ListingPage":
        offset = min(max(self.offset, 0), MAX_OFFSET)
        return ListingPage(offset, min(max(self.limit, 1), MAX_PAGE))


class SessionFilter(NamedTuple):
    """Selects among the sessions that a caller may see."""

    access_scope: AccessScope = "accessible"
    project_id: str | None = None  # None: any project, or none

    def of(self, caller: Caller) -> ColumnElement[bool]:
        """The condition on ``SessionRow``."""
        is_own = true() if self.access_scope == "accessible" else SessionRow.owner == caller.owner
        is_in = true() if self.project_id is None else SessionRow.project_id == self.project_id
        return and_(is_seen(caller, SessionRow.owner), is_own, is_in)


async def sessions(
    database: Database, page: ListingPage, caller: Caller, which: SessionFilter
) -> SessionsResponse:
    offset, limit = page.clamped()
    newest_first = (SessionRow.created_at.desc(), SessionRow.id)
    query = select(SessionRow.id).where(which.of(caller)).order_by(*newest_first)
    async with database.reading() as db:
        return SessionsResponse(list(await db.scalars(query.offset(offset).limit(limit))))


async def session(database: Database, row: SessionRow, offset: int, most: int) -> SessionResponse:
    """Describe a session with the IDs of its models and samplers from an offset on, ``most`` of either."""
    offset = ListingPage(offset, most).clamped().offset
    async with database.reading() as db:
        ids = [await _ids_of(db, table, row.id, offset, most) for table in (ModelRow, SamplerRow)]
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
    db: AsyncSession, table: type[ModelRow] | type[SamplerRow], session_id: str, offset: int, most: int
) -> list[str]:
    query = select(table.id).where(table.session_id == session_id).order_by(table.created_at, table.id)
    pieces = in_pieces(db, query.offset(offset).limit(most + 1), IDS_AT_ONCE)
    return [id for some in [piece async for piece in pieces] for (id,) in some]


async def training_runs(
    database: Database, page: ListingPage, caller: Caller, which: SessionFilter, room: PageRoom
) -> TrainingRunsResponse:
    page = page.clamped()
    seen = select(ModelRow.id).join(SessionRow, SessionRow.id == ModelRow.session_id).where(which.of(caller))
    newest_first = ModelRow.created_at.desc(), ModelRow.id
    query = _with_newest().where(which.of(caller)).order_by(*newest_first)
    async with database.reading() as db:
        total = await _count(db, seen)
        page_query = query.offset(page.offset).limit(page.limit)
        runs = await fitting(_training_runs(db, page_query), room)
    return TrainingRunsResponse(runs, _cursor(page, total, runs))


async def fitting(entries: AsyncGenerator[Entry], room: PageRoom) -> list[Entry]:
    """Take entries until there is no more room for them."""
    taken = list[Entry]()
    async with aclosing(entries):
        async for entry in entries:
            if not room.takes(entry):
                break
            taken.append(entry)
    return taken


def _cursor(page: ListingPage, total: int, entries: Sequence[object]) -> Cursor:
    """Say where a page is. Its limit is what it has, where it ends before its limit for lack of room."""
    is_cut = len(entries) < min(page.limit, total - page.offset)
    return Cursor(page.offset, len(entries) if is_cut else page.limit, total)


async def training_run(database: Database, model: ModelRow) -> TrainingRun:
    async with database.reading() as db:
        (run,) = [run async for run in _training_runs(db, _with_newest().where(ModelRow.id == model.id))]
    return run


async def run_checkpoints(
    database: Database, run_id: str, caller: Caller, offset: int, room: PageRoom
) -> CheckpointsResponse:
    """List the checkpoints of a run from an offset on. There is a cursor if these are not all."""
    of_run = CheckpointRow.run_id == run_id, is_seen(caller, CheckpointRow.owner), is_there()
    page = ListingPage(ListingPage(offset, 1).clamped().offset, MAX_OFFSET)
    response = await _checkpoints(database, select(CheckpointRow).where(*of_run), page, room)
    assert response.cursor is not None
    is_all = len(response.checkpoints) == response.cursor.total_count
    return CheckpointsResponse(response.checkpoints) if is_all else response


async def sampler_checkpoints(database: Database, caller: Caller) -> Sequence[CheckpointRow]:
    """Return the caller's newest checkpoints that can be sampled now, without their metadata."""
    query = select(CheckpointRow).where(
        CheckpointRow.kind == SAMPLER_WEIGHTS, is_there(), is_seen(caller, CheckpointRow.owner)
    )
    query = query.options(defer(CheckpointRow.user_metadata, raiseload=True))
    async with database.reading() as db:
        return (await db.scalars(query.order_by(*NEWEST_FIRST).limit(MAX_PAGE))).all()


async def checkpoints(
    database: Database, page: ListingPage, caller: Caller, room: PageRoom
) -> CheckpointsResponse:
    seen = select(CheckpointRow).where(is_seen(caller, CheckpointRow.owner), is_there())
    return await _checkpoints(database, seen, page.clamped(), room)


async def _checkpoints(
    database: Database, query: Select[CheckpointRow], page: ListingPage, room: PageRoom
) -> CheckpointsResponse:
    async def entries(db: AsyncSession) -> AsyncGenerator[Checkpoint]:
        page_query = query.order_by(*NEWEST_FIRST).offset(page.offset).limit(page.limit)
        async with aclosing(in_pieces(db, page_query, ROWS_AT_ONCE)) as pieces:
            async for some in pieces:
                for (row,) in some:
                    yield on_the_wire(row)

    async with database.reading() as db:
        total = await _count(db, query.with_only_columns(CheckpointRow.number))
        listed = await fitting(entries(db), room)
    return CheckpointsResponse(listed, _cursor(page, total, listed))


def is_there() -> ColumnElement[bool]:
    """Whether a checkpoint has not expired; an expired one counts as gone even before it is deleted."""
    return or_(CheckpointRow.expires_at.is_(None), CheckpointRow.expires_at > time.time())


async def _count(db: AsyncSession, query: Select[Any]) -> int:
    return await db.scalar(select(func.count()).select_from(query.subquery())) or 0


def _with_newest() -> "Select[*tuple[Any, ...]]":
    """Select models, each with its owner, the time of its newest request, and its newest checkpoints."""
    request = select(RequestRow.created_at).where(RequestRow.line == ModelRow.id)
    last_request = request.order_by(RequestRow.seq_id.desc()).limit(1).scalar_subquery()
    checkpoint = select(CheckpointRow.number).where(CheckpointRow.run_id == ModelRow.id, is_there())
    newest = checkpoint.order_by(*NEWEST_FIRST).limit(1)
    last = [newest.where(CheckpointRow.kind == kind).scalar_subquery() for kind in (WEIGHTS, SAMPLER_WEIGHTS)]
    return select(ModelRow, SessionRow.owner, last_request, *last).join(
        SessionRow, SessionRow.id == ModelRow.session_id
    )


async def _training_runs(db: AsyncSession, query: "Select[*tuple[Any, ...]]") -> AsyncGenerator[TrainingRun]:
    async for some in in_pieces(db, query, ROWS_AT_ONCE):
        numbers = {number for _, _, _, *last in some for number in last if number is not None}
        rows = await db.scalars(select(CheckpointRow).where(CheckpointRow.number.in_(numbers)))
        checkpoints = {row.number: on_the_wire(row) for row in rows}
        for model, owner, last_request_time, weights, sampler_weights in some:
            yield TrainingRun(
                training_run_id=model.id,
                base_model=model.base_model,
                model_owner=owner,
                is_lora=model.rank > 0,
                lora_rank=model.rank,
                last_request_time=write_moment(last_request_time or model.created_at),
                corrupted=False,
                last_checkpoint=checkpoints.get(weights or 0),
                last_sampler_checkpoint=checkpoints.get(sampler_weights or 0),
                user_metadata=as_texts(model.user_metadata),
            )


def on_the_wire(row: CheckpointRow) -> Checkpoint:
    return Checkpoint(
        checkpoint_id=f"{row.kind}/{row.name}",
        checkpoint_type=TYPES[row.kind],
        time=write_moment(row.created_at),
        tinker_path=row.tinker_path,
        size_bytes=row.size_bytes,
        public=row.is_public,
        user_metadata=as_texts(row.user_metadata),
        expires_at=None if row.expires_at is None else write_moment(row.expires_at),
        base_model=row.base_model,
        best=row.is_best,
    )
