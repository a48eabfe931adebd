"""Finds the sample requests of a training run in the log."""

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import Select, and_, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from spmd_tx.coordinator.requests import rows
from spmd_tx.coordinator.requests.runs import run_metrics
from spmd_tx.coordinator.requests.runs.sample_bodies import StoredSample
from spmd_tx.coordinator.storage.tables import ModelRow, RequestRow, RunMetrics, SamplerRow, SessionRow
from spmd_tx.coordinator.tenancy.callers import Caller, is_seen

NEIGHBOURS = 256  # numbers on both sides of a request, among which others of its prompt are looked for
SIMILAR_BYTES = 64  # by which the bodies of two requests with one prompt may differ in length


class SampleRange(NamedTuple):
    """Selects a part of a run's samples."""

    before: int | None = None  # number of a request, which is newer than these
    until: float | None = None  # seconds since the epoch, when they were accepted at the latest


class Logged(NamedTuple):
    """Holds the row of a request, and the sampler that it went to."""

    row: RequestRow
    sampler: SamplerRow


async def of_run(
    db: AsyncSession, model: ModelRow, caller: Caller, which: SampleRange, most: int
) -> Sequence[Logged]:
    """Return the newest ended requests of a range, newest first."""
    query = _of_run(model, caller).order_by(RequestRow.number.desc()).limit(most)
    if which.before is not None:
        query = query.where(RequestRow.number < which.before)
    if which.until is not None:
        query = query.where(RequestRow.created_at <= which.until)
    return [Logged(*row) for row in await db.execute(query)]


async def one(db: AsyncSession, model: ModelRow, caller: Caller, request_id: str) -> Logged | None:
    """Return a request of a run, if it has ended."""
    row = (await db.execute(_of_run(model, caller).where(RequestRow.id == request_id))).first()
    return None if row is None else Logged(*row)


async def neighbours(db: AsyncSession, of: Logged) -> Sequence[Logged]:
    """Return the requests to the same sampler that may have the same prompt, and the request itself."""
    row = of.row
    length = row.payload_length
    query = select(RequestRow).where(
        RequestRow.line == row.line,
        RequestRow.kind == row.kind,
        RequestRow.finished_at.is_not(None),
        RequestRow.number.between(row.number - NEIGHBOURS, row.number + NEIGHBOURS),
        RequestRow.payload_length.between(length - SIMILAR_BYTES, length + SIMILAR_BYTES),
    )
    rows = (await db.scalars(query.order_by(RequestRow.number))).all()
    return [Logged(each, of.sampler) for each in rows]


async def steps(db: AsyncSession, sampler: SamplerRow) -> int | None:
    """Return how many steps an ephemeral version was trained; None: it is none, or follows its model."""
    if sampler.model_id is None or sampler.inflight:
        return None
    query = select(func.count()).select_from(RunMetrics)
    is_step = RunMetrics.line == sampler.model_id, RunMetrics.kind == run_metrics.OPTIM_STEP
    return await db.scalar(query.where(*is_step, RunMetrics.at <= sampler.created_at)) or 0


def _of_run(model: ModelRow, caller: Caller) -> "Select[RequestRow, SamplerRow]":
    """Select by the weights: those of the run, wherever it was sampled, and the base model beside it."""
    is_base = SamplerRow.model_id.is_(None), SamplerRow.model_path.is_(None)
    return (
        select(RequestRow, SamplerRow)
        .join(SamplerRow, SamplerRow.id == RequestRow.line)
        .join(SessionRow, SessionRow.id == RequestRow.session_id)
        .where(
            RequestRow.kind == "sample",
            RequestRow.finished_at.is_not(None),
            is_seen(caller, SessionRow.owner),
            or_(
                SamplerRow.model_id == model.id,
                SamplerRow.model_path.startswith(f"tinker://{model.id}/", autoescape=True),
                and_(SamplerRow.session_id == model.session_id, *is_base),
            ),
        )
    )


def stored(logged: Logged) -> StoredSample:
    """Say where the bodies of a request are."""
    row = logged.row
    return StoredSample(row.line, rows.payload_of(row), rows.result_of(row))
