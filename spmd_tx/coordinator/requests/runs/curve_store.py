"""Keeps the metrics of the runs that pages look at in memory, so that a look reads only what is new."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar
from weakref import WeakValueDictionary

import msgspec

from spmd_tx.coordinator.requests.runs import metric_pages
from spmd_tx.coordinator.requests.runs.curve_columns import (
    BYTES_PER_POINT,
    CurveAxis,
    CurveWindow,
    RunColumns,
    chosen,
)
from spmd_tx.coordinator.runtime.threads import SMALL_BYTES, compute
from spmd_tx.coordinator.storage.database import Database
from spmd_tx.coordinator.wire.console.runs import CurvesResponse, LoggedPoint, MetricsPoint

KEPT_BYTES = 64 << 20  # of all runs; the one that is looked at stays
VALUES_AT_ONCE = 10_000  # that are added to columns
Point = TypeVar("Point", MetricsPoint, LoggedPoint)

OVERVIEW = 12  # curves that are drawn where no names are asked for


class CurveStore:
    """Reads curves of runs."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._runs: OrderedDict[str, RunColumns] = OrderedDict()  # the last one used at the end
        self._busy: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by run

    async def read(self, run: str, names: Sequence[str], window: CurveWindow) -> bytes:
        """Return an encoded CurvesResponse of what is known now; without names, of the first metrics."""
        async with self._columns(run) as columns:
            return await compute(max(columns.size, SMALL_BYTES), _encoded, columns, names, window)

    async def moment(self, run: str, name: str, axis: CurveAxis, x: float) -> float | None:
        """Return when the point of a curve was made that is nearest to a place, as ``RunColumns.moment``."""
        async with self._columns(run) as columns:
            return columns.moment(name, axis, x)

    @asynccontextmanager
    async def _columns(self, run: str) -> AsyncIterator[RunColumns]:
        """Give what is known of a run now, to one reader at a time."""
        async with self._busy.setdefault(run, asyncio.Lock()):
            columns = self._runs.pop(run, None) or RunColumns()
            await self._refresh(run, columns)
            self._runs[run] = columns
            self._forget()
            yield columns

    async def _refresh(self, run: str, columns: RunColumns) -> None:
        async with self._database.reading() as db:
            await _gather(metric_pages.all_points(db, run, columns.after), columns.add)
            await _gather(metric_pages.all_logged(db, run, columns.logged_after), columns.add_logged)

    def _forget(self) -> None:
        size = sum(columns.size for columns in self._runs.values())
        while size > KEPT_BYTES and len(self._runs) > 1:
            size -= self._runs.popitem(last=False)[1].size


async def _gather(pieces: AsyncGenerator[Sequence[Point]], add: Callable[[Sequence[Point]], None]) -> None:
    """Add the points of pieces, many at a time."""
    news, values = list[Point](), 0
    async with aclosing(pieces):
        async for piece in pieces:
            news += piece
            values += sum(len(point.metrics) for point in piece)
            if values > VALUES_AT_ONCE:
                await compute(BYTES_PER_POINT * values, add, news)
                news, values = [], 0
    await compute(BYTES_PER_POINT * values, add, news)


def _encoded(columns: RunColumns, names: Sequence[str], window: CurveWindow) -> bytes:
    curves = [columns.curve(name, window) for name in chosen(columns, names, OVERVIEW)]
    answer = CurvesResponse(columns.names, [curve for curve in curves if curve is not None])
    return msgspec.json.encode(answer)
