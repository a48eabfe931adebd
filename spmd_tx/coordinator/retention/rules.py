"""The rules of retention: deletes rows that are no longer needed, lists files that others need. SQL only.

A finished request is needed as long as its client may ask for the result, and as long as it may have to be
replayed to restore a model in use: as long as it lies behind the older of the two newest snapshots, or there
are fewer than two. All unfinished requests are needed.
"""

from collections.abc import Collection
from typing import NamedTuple

from sqlalchemy import (
    ColumnElement,
    Delete,
    ScalarSelect,
    TextClause,
    Update,
    and_,
    delete,
    exists,
    func,
    insert,
    or_,
    select,
    text,
    tuple_,
    update,
)
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from spmd_tx.coordinator.checkpoints.snapshots import KEPT, counts
from spmd_tx.coordinator.storage.tables import (
    CheckpointRow,
    ImageRow,
    ModelRow,
    PastRequest,
    RequestImage,
    RequestRow,
    SamplerRow,
    SessionRow,
    SnapshotRow,
)

TRACES_KEPT_SECONDS = 30 * 24 * 3600.0  # a short row of each request, for traces
SAMPLERS_KEPT_SECONDS = 30 * 24 * 3600.0  # rows for listings, after the end of their session


class Ages(NamedTuple):
    """Holds times, in seconds since the epoch; what is older may be deleted."""

    now: float
    results: float  # of sessions that have ended
    open_results: float  # of sessions that are open
    versions: float  # last use of superseded versions


async def forget_requests(db: AsyncSession, ages: Ages) -> int:
    """Delete the requests that are no longer needed, and return their number; keep a short row of each."""
    is_deletable = and_(_is_old(ages), ~_is_needed_to_restore())
    names = [column.name for column in PastRequest.__table__.columns]
    short_rows = select(*(getattr(RequestRow, name) for name in names)).where(is_deletable)
    await db.execute(insert(PastRequest).from_select(names, short_rows))
    return await _changed(db, delete(RequestRow).where(is_deletable))


async def forget_images(db: AsyncSession) -> int:
    """Delete the images to which no request refers any more, and return their number."""
    is_of_none = ~exists().where(RequestRow.number == RequestImage.request)
    await db.execute(delete(RequestImage).where(is_of_none))
    is_unused = ~exists().where(RequestImage.image == ImageRow.number)
    return await _changed(db, delete(ImageRow).where(is_unused))


async def forget_past_requests(db: AsyncSession, ages: Ages) -> None:
    await db.execute(delete(PastRequest).where(PastRequest.finished_at < ages.now - TRACES_KEPT_SECONDS))


async def forget_results(db: AsyncSession, ages: Ages) -> int:
    """Drop the results of old requests that are only kept for replay, and return their number."""
    is_droppable = and_(_is_old(ages), RequestRow.result_length.is_not(None))
    nowhere = dict.fromkeys(("result_body", "result_file", "result_offset", "result_length"))
    return await _changed(db, update(RequestRow).where(is_droppable).values(nowhere))


async def payload_files(db: AsyncSession) -> set[int]:
    """Return the numbers of the payload files that rows refer to."""
    payloads = await db.scalars(_different("payload_file"))
    results = await db.scalars(_different("result_file"))
    images = await db.scalars(select(ImageRow.content_file).distinct())
    return {number for number in (*payloads, *results, *images) if number is not None}


def _different(column: str) -> TextClause:
    """Select the distinct values of an indexed column, in one step per value instead of per row."""
    next_one = f"SELECT min({column}) FROM requests WHERE {column} > found.number"  # rows have a number, too
    return text(
        f"WITH RECURSIVE found(number) AS (SELECT min({column}) FROM requests UNION ALL "
        f"SELECT ({next_one}) FROM found WHERE number IS NOT NULL) SELECT number FROM found"
    )


async def forget_snapshots(db: AsyncSession) -> int:
    """Delete the rows of snapshots of models that are not in use, and return their number."""
    in_use = select(ModelRow.id).where(_is_in_use(ModelRow.session_id))
    return await _changed(db, delete(SnapshotRow).where(SnapshotRow.model_id.not_in(in_use)))


async def snapshots(db: AsyncSession) -> list[tuple[str, int]]:
    """Return model and seq_id of each snapshot."""
    rows = await db.execute(select(SnapshotRow.model_id, SnapshotRow.seq_id))
    return [(model_id, seq_id) for model_id, seq_id in rows]


async def sessions_in_use(db: AsyncSession) -> list[str]:
    return list(await db.scalars(select(SessionRow.id).where(_is_in_use(SessionRow.id))))


async def oldest_to_restore(db: AsyncSession) -> dict[str, float]:
    """Return, by session, the creation time of the oldest forward_backward that may have to be replayed."""
    first = (
        select(RequestRow.created_at)
        .where(
            RequestRow.line == ModelRow.id,
            RequestRow.kind == "forward_backward",
            RequestRow.seq_id > func.coalesce(_older_of_two(ModelRow.id), -1),
        )
        .order_by(RequestRow.seq_id)
        .limit(1)
        .scalar_subquery()
    )
    oldest: dict[str, float] = {}
    for session_id, created_at in await db.execute(
        select(ModelRow.session_id, first).where(_is_in_use(ModelRow.session_id))
    ):
        if created_at is not None:
            oldest[session_id] = min(created_at, oldest.get(session_id, created_at))
    return oldest


async def versions_in_use(db: AsyncSession) -> set[str]:
    """Return the versions that samplers of sessions in use draw from.

    One without a name has the name of its sampler, whose row names the save that it comes from.
    """
    query = select(SamplerRow.id, SamplerRow.version).where(_is_in_use(SamplerRow.session_id))
    return {name for names in await db.execute(query) for name in names if name is not None}


async def superseded_versions(db: AsyncSession, ages: Ages) -> dict[str, str]:
    """Return ephemeral versions that are not the newest of their model and were unused for long.

    They have the names of their base models.
    """
    is_frozen = and_(SamplerRow.model_id.is_not(None), SamplerRow.inflight.is_(False))
    ephemeral = and_(is_frozen, _is_in_use(SamplerRow.session_id))
    newest = (
        select(SamplerRow.model_id, func.max(SamplerRow.created_at))
        .where(ephemeral)
        .group_by(SamplerRow.model_id)
    )
    was_used = exists().where(
        RequestRow.line == SamplerRow.id,
        RequestRow.kind == "sample",
        or_(RequestRow.created_at >= ages.versions, RequestRow.finished_at.is_(None)),
    )
    query = select(SamplerRow.id, SamplerRow.base_model).where(
        ephemeral,
        SamplerRow.created_at < ages.versions,
        tuple_(SamplerRow.model_id, SamplerRow.created_at).not_in(newest),
        ~was_used,
    )
    return {row.id: row.base_model for row in await db.execute(query)}


async def forget_samplers(db: AsyncSession, ages: Ages) -> int:
    """Delete the rows of samplers whose session ended long ago; return their number."""
    long_ended = select(SessionRow.id).where(SessionRow.ended_at < ages.now - SAMPLERS_KEPT_SECONDS)
    return await _changed(db, delete(SamplerRow).where(SamplerRow.session_id.in_(long_ended)))


def _is_old(ages: Ages) -> ColumnElement[bool]:
    return or_(
        RequestRow.finished_at < ages.open_results,
        and_(RequestRow.finished_at < ages.results, ~_is_open(RequestRow.session_id)),
    )


def _is_needed_to_restore() -> ColumnElement[bool]:
    """Samples change no state. A creation stays as long as its model, so that a duplicate is recognized."""
    is_behind_snapshots = RequestRow.seq_id > func.coalesce(_older_of_two(RequestRow.line), -1)
    return and_(
        RequestRow.kind != "sample",
        _is_in_use(RequestRow.session_id),
        or_(RequestRow.seq_id == 0, is_behind_snapshots),
    )


def _older_of_two(model_id: InstrumentedAttribute[str]) -> ScalarSelect[int]:
    """Select the request of the older of a model's two newest snapshots; null where there are fewer."""
    return (
        select(func.min(SnapshotRow.seq_id))
        .where(SnapshotRow.model_id == model_id, counts())
        .having(func.count() >= KEPT)
        .scalar_subquery()
    )


def _is_open(session_id: InstrumentedAttribute[str]) -> ColumnElement[bool]:
    return session_id.in_(select(SessionRow.id).where(SessionRow.ended_at.is_(None)))


def _is_in_use(session_id: InstrumentedAttribute[str]) -> ColumnElement[bool]:
    """A session is in use while it is open or has unfinished requests."""
    at_work = select(RequestRow.session_id).where(RequestRow.finished_at.is_(None))
    return or_(_is_open(session_id), session_id.in_(at_work.correlate(None)))


async def _changed(db: AsyncSession, change: Delete | Update) -> int:
    """Delete or update rows, and return their number."""
    return (await db.execute(change)).rowcount  # pyright: ignore[reportAttributeAccessIssue]


async def saved_runs(db: AsyncSession, runs: Collection[str]) -> set[str]:
    """Return those of some training runs that have a checkpoint."""
    if not runs:
        return set()
    return set(await db.scalars(select(CheckpointRow.run_id).where(CheckpointRow.run_id.in_(runs))))
