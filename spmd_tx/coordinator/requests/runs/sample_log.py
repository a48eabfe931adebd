"""Finds the sample requests of a training run in the log."""

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple, TypeAlias

from sqlalchemy import ColumnElement, Select, and_, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from spmd_tx.coordinator.requests import rows
from spmd_tx.coordinator.requests.runs import run_metrics
from spmd_tx.coordinator.requests.runs.sample_bodies import StoredSample
from spmd_tx.coordinator.storage.tables import ModelRow, RequestRow, RunMetrics, SamplerRow, SessionRow
from spmd_tx.coordinator.tenancy.callers import Caller, is_seen

NEIGHBOURS = 256  # numbers on both sides of a request, among which others of its prompt are looked for
SIMILAR_BYTES = 64  # by which the bodies of two requests with one prompt may differ in length
IDS_AT_ONCE = 1000  # of requests, in a statement


Samples: TypeAlias = "Select[RequestRow, SamplerRow]"


class SampleRange(NamedTuple):
    """Selects a part of a run's samples."""

    before: int | None = None  # number of a request, which is newer than these
    until: float | None = None  # seconds since the epoch, when they were accepted at the latest
    similar_to: int | None = None  # bytes, by whose length a body is likely to have a prompt; None: any body


class Logged(NamedTuple):
    """Holds the row of a request, and the sampler that it went to."""

    row: RequestRow
    sampler: SamplerRow


async def newest(db: AsyncSession, among: Samples, most: int) -> list[tuple[int, Logged]]:
    """Return the newest of some requests with their numbers, newest first."""
    query = among.order_by(RequestRow.number.desc()).limit(most)
    return [(row.number, Logged(row, sampler)) for row, sampler in await db.execute(query)]


async def in_order(
    db: AsyncSession, among: Samples, ids: Sequence[str], most: int
) -> list[tuple[int, Logged]]:
    """Return the first requests among some, in the order of these IDs, each with the place of its ID."""
    found = list[int]()
    for first in range(0, len(ids), IDS_AT_ONCE):
        part = ids[first : first + IDS_AT_ONCE]
        query = among.with_only_columns(RequestRow.id, maintain_column_froms=True)
        known = set(await db.scalars(query.where(RequestRow.id.in_(part))))
        found += [first + i for i, request_id in enumerate(part) if request_id in known]
        if len(found) >= most:
            break
    places = {ids[place]: place for place in found[:most]}
    rows = await db.execute(among.where(RequestRow.id.in_(places)))
    return sorted(((places[row.id], Logged(row, sampler)) for row, sampler in rows), key=itemgetter(0))


async def one(db: AsyncSession, model: ModelRow, caller: Caller, request_id: str) -> Logged:
    """Return a request of a run. Raises NotFound unless it has ended, and is kept."""
    row = (await db.execute(_of_run(model, caller).where(RequestRow.id == request_id))).first()
    if row is None:
        raise rows.not_kept(request_id)
    return Logged(*row)


async def neighbours(db: AsyncSession, of: Logged) -> Sequence[Logged]:
    """Return the requests to the same sampler that may have the same prompt, and the request itself."""
    row = of.row
    query = select(RequestRow).where(
        RequestRow.line == row.line,
        RequestRow.kind == row.kind,
        RequestRow.finished_at.is_not(None),
        RequestRow.number.between(row.number - NEIGHBOURS, row.number + NEIGHBOURS),
        _is_similar(row.payload_length),
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


def in_range(model: ModelRow, caller: Caller, which: SampleRange) -> Samples:
    """Select the ended requests of a range."""
    query = _of_run(model, caller)
    if which.before is not None:
        query = query.where(RequestRow.number < which.before)
    if which.until is not None:
        query = query.where(RequestRow.created_at <= which.until)
    if which.similar_to is not None:
        query = query.where(_is_similar(which.similar_to))
    return query


def _is_similar(length: int) -> ColumnElement[bool]:
    """Whether a body may hold the prompt of another one, by the lengths of both."""
    return RequestRow.payload_length.between(length - SIMILAR_BYTES, length + SIMILAR_BYTES)


def _of_run(model: ModelRow, caller: Caller) -> Samples:
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
