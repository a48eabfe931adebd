"""Keeps the metrics of the runs that pages look at in memory, so that a look reads only what is new."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import msgspec

from spmd_tx.coordinator.requests.runs import metric_pages
from spmd_tx.coordinator.requests.runs.curve_columns import CurveAxis, CurveWindow, RunColumns, chosen
from spmd_tx.coordinator.runtime.threads import SMALL_BYTES, compute
from spmd_tx.coordinator.storage.database import Database
from spmd_tx.coordinator.wire.console.runs import CurvesResponse, LoggedPoint, MetricsPoint

KEPT_BYTES = 64 << 20  # of all runs; the one that is looked at stays
POINTS_AT_ONCE = 2000
BYTES_AT_ONCE = 4 << 20
Point = TypeVar("Point", MetricsPoint, LoggedPoint)

OVERVIEW = 12  # curves that are drawn where no names are asked for


class CurveStore:
    """Reads curves of runs."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._runs: OrderedDict[str, RunColumns] = OrderedDict()  # the last one used at the end
        self._busy: dict[str, asyncio.Lock] = {}  # by run, while somebody waits

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
        lock = self._busy.setdefault(run, asyncio.Lock())
        try:
            async with lock:
                columns = self._runs.pop(run, None) or RunColumns()
                await self._refresh(run, columns)
                self._runs[run] = columns
                self._forget()
                yield columns
        finally:
            if not lock.locked() and self._busy.get(run) is lock:
                del self._busy[run]

    async def _refresh(self, run: str, columns: RunColumns) -> None:
        async with self._database.reading() as db:
            is_whole = False
            while not is_whole:
                page = await metric_pages.points(db, run, columns.after, POINTS_AT_ONCE, BYTES_AT_ONCE)
                await _add(page.entries, MetricsPoint, columns.add)
                is_whole = page.following is None
            is_whole = False
            while not is_whole:
                page = await metric_pages.logged(db, run, columns.logged_after, POINTS_AT_ONCE, BYTES_AT_ONCE)
                await _add(page.entries, LoggedPoint, columns.add_logged)
                is_whole = page.following is None

    def _forget(self) -> None:
        size = sum(columns.size for columns in self._runs.values())
        while size > KEPT_BYTES and len(self._runs) > 1:
            size -= self._runs.popitem(last=False)[1].size


async def _add(
    entries: Sequence[msgspec.Raw], type_: type[Point], add: Callable[[Iterable[Point]], None]
) -> None:
    def decode() -> None:
        add([msgspec.json.decode(each, type=type_) for each in entries])

    await compute(sum(len(bytes(each)) for each in entries), decode)


def _encoded(columns: RunColumns, names: Sequence[str], window: CurveWindow) -> bytes:
    curves = [columns.curve(name, window) for name in chosen(columns, names, OVERVIEW)]
    answer = CurvesResponse(columns.names, [curve for curve in curves if curve is not None])
    return msgspec.json.encode(answer)
