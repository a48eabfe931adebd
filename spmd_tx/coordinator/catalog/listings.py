"""Builds the answers of the listing routes, newest first. Reads only."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple

from sqlalchemy import ColumnElement, Select, and_, func, or_, select, true
from sqlalchemy.ext.asyncio import AsyncSession

from spmd_tx.coordinator.storage.database import Database
from spmd_tx.coordinator.storage.tables import Checkpoint, Model, RequestRow, Sampler, Session
from spmd_tx.coordinator.tenancy.callers import Caller, is_seen
from spmd_tx.coordinator.wire.checkpoint_paths import EXTERNAL_WEIGHTS, SAMPLER_WEIGHTS, WEIGHTS
from spmd_tx.coordinator.wire.checkpoints import Checkpoint as WireCheckpoint
from spmd_tx.coordinator.wire.checkpoints import (
    CheckpointsResponse,
    Cursor,
    TrainingRun,
    TrainingRunsResponse,
)
from spmd_tx.coordinator.wire.sessions import SessionResponse, SessionsResponse, as_texts

MAX_PAGE = 1000
MAX_OFFSET = 2**63 - 1  # of the databases

NEWEST_FIRST = (Checkpoint.created_at.desc(), Checkpoint.number.desc())

AccessScope = Literal["owned", "accessible"]

TYPES = {WEIGHTS: "training", SAMPLER_WEIGHTS: "sampler", EXTERNAL_WEIGHTS: "external"}


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


async def session(database: Database, row: Session) -> SessionResponse:
    async with database.reading() as db:
        models = await db.scalars(
            select(Model.id).where(Model.session_id == row.id).order_by(Model.created_at)
        )
        samplers = select(Sampler.id).where(Sampler.session_id == row.id).order_by(Sampler.created_at)
        return SessionResponse(
            training_run_ids=list(models),
            sampler_ids=list(await db.scalars(samplers)),
            user_metadata=as_texts(row.user_metadata),
            display_name=row.display_name,
        )


async def training_runs(database: Database, page: Page, caller: Caller, which: Which) -> TrainingRunsResponse:
    offset, limit = page.clamped()
    belongs_to = Session.id == Model.session_id
    seen = select(Model).join(Session, belongs_to).where(which.of(caller))
    async with database.reading() as db:
        total = await _count(db, seen)
        newest_first = seen.order_by(Model.created_at.desc(), Model.id)
        models = (await db.scalars(newest_first.offset(offset).limit(limit))).all()
        runs = [await _training_run(db, model) for model in models]
    return TrainingRunsResponse(runs, Cursor(offset, limit, total))


async def training_run(database: Database, model: Model) -> TrainingRun:
    async with database.reading() as db:
        return await _training_run(db, model)


async def run_checkpoints(database: Database, run_id: str, caller: Caller) -> CheckpointsResponse:
    seen = select(Checkpoint).where(
        Checkpoint.run_id == run_id, is_seen(caller, Checkpoint.owner), is_there()
    )
    async with database.reading() as db:
        rows = (await db.scalars(seen.order_by(*NEWEST_FIRST))).all()
    return CheckpointsResponse(on_the_wire(rows))


async def sampler_checkpoints(database: Database, caller: Caller) -> Sequence[Checkpoint]:
    """The caller's newest checkpoints that can be sampled now."""
    query = select(Checkpoint).where(
        Checkpoint.kind == SAMPLER_WEIGHTS, is_there(), is_seen(caller, Checkpoint.owner)
    )
    async with database.reading() as db:
        return (await db.scalars(query.order_by(*NEWEST_FIRST).limit(MAX_PAGE))).all()


async def checkpoints(database: Database, page: Page, caller: Caller) -> CheckpointsResponse:
    offset, limit = page.clamped()
    seen = select(Checkpoint).where(is_seen(caller, Checkpoint.owner), is_there())
    async with database.reading() as db:
        rows = (await db.scalars(seen.order_by(*NEWEST_FIRST).offset(offset).limit(limit))).all()
        total = await _count(db, seen)
    return CheckpointsResponse(on_the_wire(rows), Cursor(offset, limit, total))


def is_there() -> ColumnElement[bool]:
    """Whether a checkpoint has not expired; an expired one counts as gone even before it is deleted."""
    return or_(Checkpoint.expires_at.is_(None), Checkpoint.expires_at > time.time())


async def _count(db: AsyncSession, query: Select[Any]) -> int:
    return await db.scalar(select(func.count()).select_from(query.subquery())) or 0


async def _training_run(db: AsyncSession, model: Model) -> TrainingRun:
    newest_first = select(RequestRow.created_at).order_by(RequestRow.seq_id.desc())
    last_request_time = await db.scalar(newest_first.where(RequestRow.line == model.id).limit(1))
    return TrainingRun(
        training_run_id=model.id,
        base_model=model.base_model,
        model_owner=await db.scalar(select(Session.owner).where(Session.id == model.session_id)) or "",
        is_lora=model.rank > 0,
        lora_rank=model.rank,
        last_request_time=_rfc3339(last_request_time or model.created_at),
        corrupted=False,
        last_checkpoint=await _last_checkpoint(db, model, WEIGHTS),
        last_sampler_checkpoint=await _last_checkpoint(db, model, SAMPLER_WEIGHTS),
        user_metadata=as_texts(model.user_metadata),
    )


async def _last_checkpoint(db: AsyncSession, model: Model, kind: str) -> WireCheckpoint | None:
    query = (
        select(Checkpoint)
        .where(Checkpoint.run_id == model.id, Checkpoint.kind == kind, is_there())
        .order_by(*NEWEST_FIRST)
        .limit(1)
    )
    row = await db.scalar(query)
    return row and _checkpoint(row)


def on_the_wire(rows: Sequence[Checkpoint]) -> list[WireCheckpoint]:
    return [_checkpoint(row) for row in rows]


def _checkpoint(row: Checkpoint) -> WireCheckpoint:
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
