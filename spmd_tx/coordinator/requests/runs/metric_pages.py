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
    last = wanted[:limit][-1]
    query = _rows(line, after).where(RunMetrics.seq_id <= last)
    maker = _PointPage(_Joiner(await steps_until(db, line, after)), most_bytes)
    async with aclosing(sized_pieces(db, query, _bytes_of)) as pieces:
        async for rows in pieces:
            if not await compute(sum(map(_bytes_of, rows)), maker.add, rows):
                break
    is_last = len(wanted) <= limit and maker.last == last
    return Page(maker.points, None if is_last else maker.last)


async def all_points(db: AsyncSession, line: str, after: int) -> AsyncGenerator[list[MetricsPoint]]:
    """Yield all finished steps behind the one with the seq_id ``after`` (-1: of the run), piece by piece."""
    joiner = _Joiner(await steps_until(db, line, after))
    async with aclosing(sized_pieces(db, _rows(line, after), _bytes_of)) as pieces:
        async for rows in pieces:
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


async def logged(db: AsyncSession, line: str, after: int, limit: int, most_bytes: int) -> Page:
    """Return what a client has sent with steps of its own since the entry with the number ``after``."""
    query = _logged_rows(line, after).limit(limit + 1)
    maker = _LoggedPage(after, limit, most_bytes)
    async with aclosing(sized_pieces(db, query, _bytes_of)) as pieces:
        async for rows in pieces:
            if not await compute(sum(map(_bytes_of, rows)), maker.add, rows):
                return Page(maker.points, maker.last)
    return Page(maker.points, None)


async def all_logged(db: AsyncSession, line: str, after: int) -> AsyncGenerator[list[LoggedPoint]]:
    """Yield all that a client has sent so since the entry with the number ``after``, piece by piece."""
    async with aclosing(sized_pieces(db, _logged_rows(line, after), _bytes_of)) as pieces:
        async for rows in pieces:
            yield await compute(sum(map(_bytes_of, rows)), _logged_points, rows)


def _logged_rows(line: str, after: int) -> "Select[int, int | None, float, str]":
    columns = RunMetrics.number, RunMetrics.step, RunMetrics.at, TEXT
    rows = select(*columns).where(RunMetrics.line == line, IS_LOGGED, RunMetrics.number > after)
    return rows.order_by(RunMetrics.number)


def _logged_points(rows: Iterable[_LoggedRow]) -> list[LoggedPoint]:
    return [_logged_point(row) for row in rows]


def _logged_point(row: _LoggedRow) -> LoggedPoint:
    number, step, at, text = row
    assert step is not None
    return LoggedPoint(number, step, at, msgspec.json.decode(text, type=Values))


class _LoggedPage:
    """Encodes what a client has sent, until a page has its bytes or its entries."""

    def __init__(self, after: int, limit: int, most_bytes: int) -> None:
        self.points: list[msgspec.Raw] = []
        self.last = after  # number of the last one
        self._limit = limit
        self._left = most_bytes

    def add(self, rows: Sequence[_LoggedRow]) -> bool:
        """Add rows, in their order; return whether there was room for all of them."""
        for row in rows:
            if len(self.points) == self._limit or self._left <= 0:
                return False
            point = _logged_point(row)
            self.points.append(_encoded(point))
            self._left -= _bytes_of(row)
            self.last = point.number
        return True


def _bytes_of(row: Sequence[Any]) -> int:
    return len(row[-1])


class _Joiner:
    """Puts rows together into points."""

    def __init__(self, first: int) -> None:
        self._step = first
        self._passes: list[Values] = []
        self._said: Values = {}

    def points(self, rows: Iterable[_Row]) -> list[MetricsPoint]:
        """Return the points that end with one of these rows."""
        return [point for row in rows if (point := self.point(row)) is not None]

    def point(self, row: _Row) -> MetricsPoint | None:
        """Take the next row, and return the point that ends with it, if one does."""
        seq_id, kind, at, step, text = row
        metrics: Values = msgspec.json.decode(text, type=Values)
        if kind == FORWARD_BACKWARD:
            self._passes.append(metrics)
            return None
        if kind == CLIENT:
            self._said |= metrics
            return None
        number = self._step if step is None else step
        together = merged(self._passes) | metrics | self._said
        self._step, self._passes, self._said = number + 1, [], {}
        return MetricsPoint(seq_id, number, at, together)


class _PointPage:
    """Encodes points, until a page has its bytes."""

    def __init__(self, joiner: _Joiner, most_bytes: int) -> None:
        self.points: list[msgspec.Raw] = []
        self.last: int | None = None  # seq_id of the last point
        self._joiner = joiner
        self._left = most_bytes

    def add(self, rows: Sequence[_Row]) -> bool:
        """Add rows, in their order; return whether the page has room for more."""
        for row in rows:
            if self._left <= 0:
                break
            point = self._joiner.point(row)
            if point is not None:
                encoded = _encoded(point)
                self.points.append(encoded)
                self._left -= len(bytes(encoded))
                self.last = point.seq
        return self._left > 0


def _encoded(entry: msgspec.Struct) -> msgspec.Raw:
    """Encode each entry by itself: a whole page would hold up other threads for too long."""
    return msgspec.Raw(msgspec.json.encode(entry))


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
