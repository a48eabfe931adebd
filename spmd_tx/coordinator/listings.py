"""What the listing routes answer, newest first. Reads only."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from spmd_tx.coordinator import schemas
from spmd_tx.coordinator.checkpoint_files import SAMPLER_WEIGHTS, WEIGHTS
from spmd_tx.coordinator.database import Database
from spmd_tx.coordinator.tables import Checkpoint, Model, RequestRow, Sampler, Session

MAX_PAGE = 1000

_TYPES = {WEIGHTS: "training", SAMPLER_WEIGHTS: "sampler"}


class Page(NamedTuple):
    """Which part of a listing is wanted."""

    offset: int
    limit: int

    def clamped(self) -> "Page":
        return Page(max(self.offset, 0), min(max(self.limit, 1), MAX_PAGE))


async def sessions(database: Database, page: Page) -> schemas.SessionsResponse:
    offset, limit = page.clamped()
    query = select(Session.id).order_by(Session.created_at.desc(), Session.id).offset(offset).limit(limit)
    async with database.reading() as db:
        return schemas.SessionsResponse(list(await db.scalars(query)))


async def session(database: Database, row: Session) -> schemas.SessionResponse:
    async with database.reading() as db:
        models = await db.scalars(
            select(Model.id).where(Model.session_id == row.id).order_by(Model.created_at)
        )
        samplers = select(Sampler.id).where(Sampler.session_id == row.id).order_by(Sampler.created_at)
        return schemas.SessionResponse(
            training_run_ids=list(models),
            sampler_ids=list(await db.scalars(samplers)),
            user_metadata=row.user_metadata,
            display_name=row.display_name,
        )


async def training_runs(database: Database, page: Page) -> schemas.TrainingRunsResponse:
    offset, limit = page.clamped()
    query = select(Model).order_by(Model.created_at.desc(), Model.id).offset(offset).limit(limit)
    async with database.reading() as db:
        models = (await db.scalars(query)).all()
        total = await db.scalar(select(func.count()).select_from(Model)) or 0
        runs = [await _training_run(db, model) for model in models]
    return schemas.TrainingRunsResponse(runs, schemas.Cursor(offset, limit, total))


async def training_run(database: Database, model: Model) -> schemas.TrainingRun:
    async with database.reading() as db:
        return await _training_run(db, model)


async def run_checkpoints(database: Database, run_id: str) -> schemas.CheckpointsResponse:
    query = select(Checkpoint).where(Checkpoint.run_id == run_id).order_by(Checkpoint.created_at.desc())
    async with database.reading() as db:
        return schemas.CheckpointsResponse(_checkpoints((await db.scalars(query)).all()))


async def sampler_checkpoints(database: Database) -> Sequence[Checkpoint]:
    """The newest ones that can be sampled now."""
    is_open = or_(Checkpoint.expires_at.is_(None), Checkpoint.expires_at > time.time())
    query = select(Checkpoint).where(Checkpoint.kind == SAMPLER_WEIGHTS, is_open)
    async with database.reading() as db:
        newest_first = query.order_by(Checkpoint.created_at.desc(), Checkpoint.number)
        return (await db.scalars(newest_first.limit(MAX_PAGE))).all()


async def checkpoints(database: Database, page: Page) -> schemas.CheckpointsResponse:
    offset, limit = page.clamped()
    newest_first = (Checkpoint.created_at.desc(), Checkpoint.number)
    query = select(Checkpoint).order_by(*newest_first).offset(offset).limit(limit)
    async with database.reading() as db:
        rows = (await db.scalars(query)).all()
        total = await db.scalar(select(func.count()).select_from(Checkpoint)) or 0
    return schemas.CheckpointsResponse(_checkpoints(rows), schemas.Cursor(offset, limit, total))


async def _training_run(db: AsyncSession, model: Model) -> schemas.TrainingRun:
    last_request = select(func.max(RequestRow.created_at)).where(RequestRow.line == model.id)
    last_request_time = await db.scalar(last_request) or model.created_at
    return schemas.TrainingRun(
        training_run_id=model.id,
        base_model=model.base_model,
        model_owner="local",
        is_lora=True,
        lora_rank=model.rank,
        last_request_time=_rfc3339(last_request_time),
        corrupted=False,
        last_checkpoint=await _last_checkpoint(db, model, WEIGHTS),
        last_sampler_checkpoint=await _last_checkpoint(db, model, SAMPLER_WEIGHTS),
        user_metadata=model.user_metadata,
    )


async def _last_checkpoint(db: AsyncSession, model: Model, kind: str) -> schemas.Checkpoint | None:
    query = (
        select(Checkpoint)
        .where(Checkpoint.run_id == model.id, Checkpoint.kind == kind)
        .order_by(Checkpoint.created_at.desc())
        .limit(1)
    )
    row = await db.scalar(query)
    return row and _checkpoint(row)


def _checkpoints(rows: Sequence[Checkpoint]) -> list[schemas.Checkpoint]:
    return [_checkpoint(row) for row in rows]


def _checkpoint(row: Checkpoint) -> schemas.Checkpoint:
    return schemas.Checkpoint(
        checkpoint_id=f"{row.kind}/{row.name}",
        checkpoint_type=_TYPES[row.kind],
        time=_rfc3339(row.created_at),
        tinker_path=row.tinker_path,
        size_bytes=row.size_bytes,
        public=row.is_public,
        user_metadata=row.user_metadata,
        expires_at=None if row.expires_at is None else _rfc3339(row.expires_at),
    )


def _rfc3339(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
