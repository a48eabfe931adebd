"""Reads the metrics of runs, page by page: the steps of the server, and what clients have sent of their own.

A page ends when its bytes are reached. Rows are read in pieces, and decoded and put together in threads, so
neither long runs nor large rows hold up the event loop.
"""

from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, NamedTuple, cast

import msgspec
from sqlalchemy import Text, select
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


class Page(NamedTuple):
    """Holds encoded entries, and where to go on; None: there are no more now."""

    entries: list[msgspec.Raw]
    following: int | None


class _Row(NamedTuple):
    """Holds what points are made of."""

    seq_id: int
    kind: str
    at: float
    step: int | None
    metrics: str  # JSON


class _LoggedRow(NamedTuple):
    """Holds what a client has sent."""

    number: int
    step: int | None  # never None here
    at: float
    metrics: str  # JSON


async def points(db: AsyncSession, line: str, after: int, limit: int, most_bytes: int) -> Page:
    """Return the finished steps behind the one with the seq_id ``after`` (-1: all)."""
    ends = select(RunMetrics.seq_id).where(is_step(line), RunMetrics.seq_id > after)
    wanted = (await db.scalars(ends.order_by(RunMetrics.seq_id).limit(limit + 1))).all()
    if not wanted:
        return Page([], None)
    last = wanted[:limit][-1]
    columns = RunMetrics.seq_id, RunMetrics.kind, RunMetrics.at, RunMetrics.step, TEXT
    query = select(*columns).where(
        RunMetrics.line == line, RunMetrics.seq_id > after, RunMetrics.seq_id <= last, ~IS_LOGGED
    )
    maker = _Points(await steps_until(db, line, after), most_bytes)
    # A client's row has the number of the request before it, so it comes behind that one.
    query = query.order_by(RunMetrics.seq_id, RunMetrics.number)
    async with aclosing(sized_pieces(db, query, _bytes_of)) as pieces:
        async for rows in pieces:
            size = sum(map(_bytes_of, rows))
            if not await compute(size, maker.add, [_Row(*row) for row in rows]):
                break
    is_last = len(wanted) <= limit and maker.last == last
    return Page(maker.points, None if is_last else maker.last)


async def logged(db: AsyncSession, line: str, after: int, limit: int, most_bytes: int) -> Page:
    """Return what a client has sent with steps of its own since the entry with the number ``after``."""
    columns = RunMetrics.number, RunMetrics.step, RunMetrics.at, TEXT
    query = select(*columns).where(RunMetrics.line == line, IS_LOGGED, RunMetrics.number > after)
    query = query.order_by(RunMetrics.number).limit(limit + 1)
    maker = _LoggedPoints(after, limit, most_bytes)
    async with aclosing(sized_pieces(db, query, _bytes_of)) as pieces:
        async for rows in pieces:
            if not await compute(sum(map(_bytes_of, rows)), maker.add, [_LoggedRow(*row) for row in rows]):
                return Page(maker.points, maker.last)
    return Page(maker.points, None)


class _LoggedPoints:
    """Encodes what a client has sent, until a page has its bytes or its entries."""

    def __init__(self, after: int, limit: int, most_bytes: int) -> None:
        self.points: list[msgspec.Raw] = []
        self.last = after  # number of the last one
        self._limit = limit
        self._left = most_bytes

    def add(self, rows: Sequence[_LoggedRow]) -> bool:
        """Add rows, in their order; return whether there was room for all of them."""
        for number, step, at, metrics in rows:
            if len(self.points) == self._limit or self._left <= 0:
                return False
            assert step is not None
            values = msgspec.json.decode(metrics, type=Values)
            self.points.append(_encoded(LoggedPoint(number, step, at, values)))
            self._left -= len(metrics)
            self.last = number
        return True


def _bytes_of(row: Sequence[Any]) -> int:
    return len(row[-1])


class _Points:
    """Puts rows together into points, until a page has its bytes."""

    def __init__(self, first: int, most_bytes: int) -> None:
        self.points: list[msgspec.Raw] = []
        self.last: int | None = None  # seq_id of the last point
        self._step = first
        self._left = most_bytes
        self._passes: list[Values] = []
        self._said: Values = {}

    def add(self, rows: Sequence[_Row]) -> bool:
        """Add rows, in their order; return whether the page has room for more."""
        for row in rows:
            if self._left <= 0:
                break
            metrics: Values = msgspec.json.decode(row.metrics, type=Values)
            if row.kind == FORWARD_BACKWARD:
                self._passes.append(metrics)
            elif row.kind == CLIENT:
                self._said |= metrics
            else:
                self._end(row, metrics)
        return self._left > 0

    def _end(self, row: _Row, metrics: Values) -> None:
        step = self._step if row.step is None else row.step
        point = _encoded(MetricsPoint(row.seq_id, step, row.at, merged(self._passes) | metrics | self._said))
        self.points.append(point)
        self._left -= len(bytes(point))
        self.last, self._step = row.seq_id, step + 1
        self._passes, self._said = [], {}


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
