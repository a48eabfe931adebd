"""Reads the metrics of runs, page by page: the steps of the server, and what clients have sent of their own.

A page ends when its bytes are reached. Rows are read in pieces, and decoded and put together in threads, so
neither long runs nor large rows hold up the event loop.
"""

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, cast

import msgspec
from sqlalchemy import Select, Text, and_, func, or_, select
from sqlalchemy import cast as cast_in_sql
from sqlalchemy.ext.asyncio import AsyncSession

from spmd_tx.coordinator.requests.runs.run_metrics import (
    CLIENT,
    FORWARD_BACKWARD,
    IS_LOGGED,
    Values,
    count,
    is_step,
    merged,
)
from spmd_tx.coordinator.runtime.threads import compute
from spmd_tx.coordinator.storage.row_pieces import sized_pieces
from spmd_tx.coordinator.storage.tables import RunMetrics
from spmd_tx.coordinator.wire.console.runs import LoggedPoint, MetricsPoint

VALUE_BYTES = 40  # of a metric in an entry, about
TEXT = cast_in_sql(RunMetrics.metrics, Text)  # as it is stored: databases would decode it in the event loop

_Row = tuple[int, str, float, int | None, str]  # seq_id, kind, at, step, metrics as JSON
_LoggedRow = tuple[int, int | None, float, str]  # number, step (never None here), at, metrics as JSON


class Page(NamedTuple):
    """Holds encoded entries, and where to go on; None: there are no more now."""

    entries: list[msgspec.Raw]
    following: int | None


async def points(db: AsyncSession, line: str, after: int, limit: int, most_bytes: int) -> Page:
    """Return the finished steps behind the one with the seq_id ``after`` (-1: all)."""
    ends = select(RunMetrics.seq_id).where(is_step(line), RunMetrics.seq_id > after)
    wanted = (await db.scalars(ends.order_by(RunMetrics.seq_id).limit(limit + 1))).all()
    if not wanted:
        return Page([], None)
    return await _page(all_points(db, line, after, wanted[-1]), limit, most_bytes)


async def logged(db: AsyncSession, line: str, after: int, limit: int, most_bytes: int) -> Page:
    """Return what a client has sent with steps of its own since the entry with the number ``after``."""
    return await _page(all_logged(db, line, after, limit + 1), limit, most_bytes)


async def _page(
    pieces: AsyncGenerator[Sequence[MetricsPoint | LoggedPoint]], limit: int, most_bytes: int
) -> Page:
    """Encode the first entries, until a page has its bytes or its entries."""
    page, left = Page([], None), most_bytes
    async with aclosing(pieces):
        async for piece in pieces:
            values = sum(len(point.metrics) for point in piece)
            encoded = await compute(VALUE_BYTES * values, _encoded, piece)
            for point, entry in zip(piece, encoded, strict=True):
                if len(page.entries) == limit or left <= 0:
                    return page
                page.entries.append(entry)
                left -= len(bytes(entry))
                page = page._replace(following=point.seq if isinstance(point, MetricsPoint) else point.number)
    return page._replace(following=None)


async def all_points(
    db: AsyncSession, line: str, after: int, until: int | None = None
) -> AsyncGenerator[list[MetricsPoint]]:
    """Yield all finished steps behind the seq_id ``after`` (-1: of the run) up to ``until``, by pieces."""
    joiner: _Joiner | None = None
    query = _rows(line, after)
    if until is not None:  # else PostgreSQL may sort all rows that follow
        query = query.where(RunMetrics.seq_id <= until)
    async with aclosing(sized_pieces(db, query, _bytes_of)) as pieces:
        async for rows in pieces:
            joiner = joiner or _Joiner(await steps_until(db, line, after))
            yield await compute(sum(map(_bytes_of, rows)), joiner.points, rows)


def _rows(line: str, after: int) -> "Select[int, str, float, int | None, str]":
    """Select what the points behind a step are made of, in the order of their requests.

    What a client has said has the number of the newest request at the time, so it comes behind that one.
    """
    own = select(func.max(RunMetrics.number)).where(is_step(line), RunMetrics.seq_id == after)
    is_said_since = and_(RunMetrics.kind == CLIENT, RunMetrics.number > own.scalar_subquery())
    return (
        select(RunMetrics.seq_id, RunMetrics.kind, RunMetrics.at, RunMetrics.step, TEXT)
        .where(RunMetrics.line == line, ~IS_LOGGED, RunMetrics.seq_id >= after)
        .where(or_(RunMetrics.seq_id > after, is_said_since))
        .order_by(RunMetrics.seq_id, RunMetrics.number)
    )


async def all_logged(
    db: AsyncSession, line: str, after: int, most: int | None = None
) -> AsyncGenerator[list[LoggedPoint]]:
    """Yield what a client has sent so since the entry with the number ``after``, piece by piece."""
    columns = RunMetrics.number, RunMetrics.step, RunMetrics.at, TEXT
    query = select(*columns).where(RunMetrics.line == line, IS_LOGGED, RunMetrics.number > after)
    query = query.order_by(RunMetrics.number).limit(most)
    async with aclosing(sized_pieces(db, query, _bytes_of)) as pieces:
        async for rows in pieces:
            yield await compute(sum(map(_bytes_of, rows)), _logged_points, rows)


def _logged_points(rows: Iterable[_LoggedRow]) -> list[LoggedPoint]:
    return [
        LoggedPoint(number, cast(int, step), at, msgspec.json.decode(text, type=Values))
        for number, step, at, text in rows
    ]


def _bytes_of(row: Sequence[Any]) -> int:
    return len(row[-1])


class _Joiner:
    """Puts rows together into points."""

    def __init__(self, first: int) -> None:
        self._step = first
        self._passes: list[Values] = []
        self._said: Values = {}

    def points(self, rows: Iterable[_Row]) -> list[MetricsPoint]:
        """Take the next rows, and return the points that end with one of them."""
        points = list[MetricsPoint]()
        for seq_id, kind, at, step, text in rows:
            metrics: Values = msgspec.json.decode(text, type=Values)
            if kind == FORWARD_BACKWARD:
                self._passes.append(metrics)
            elif kind == CLIENT:
                self._said |= metrics
            else:
                number = self._step if step is None else step
                points.append(MetricsPoint(seq_id, number, at, merged(self._passes) | metrics | self._said))
                self._step, self._passes, self._said = number + 1, [], {}
        return points


def _encoded(entries: Iterable[msgspec.Struct]) -> list[msgspec.Raw]:
    """Encode each entry by itself: a whole page would hold up other threads for too long."""
    return [msgspec.Raw(msgspec.json.encode(entry)) for entry in entries]


async def steps_until(db: AsyncSession, line: str, after: int) -> int:
    """Return how many steps a run had taken by a seq_id; thinned runs have the numbers of theirs."""
    known = select(RunMetrics.seq_id, RunMetrics.step).where(
        is_step(line), RunMetrics.seq_id <= after, RunMetrics.step.is_not(None)
    )
    last = (await db.execute(known.order_by(RunMetrics.seq_id.desc()).limit(1))).first()
    if last is None:
        return await count(db, line, RunMetrics.seq_id <= after)
    since = await count(db, line, RunMetrics.seq_id > last.seq_id, RunMetrics.seq_id <= after)
    return cast(int, last.step) + 1 + since
