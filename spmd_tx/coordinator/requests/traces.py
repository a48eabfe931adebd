"""Builds traces of sessions as files in the background, and keeps them for a while.

A trace is in the JSON format of Chrome's trace events. Each line is a process, and each of its lanes shows
requests that do not overlap, as slices with a slice for each stage.
"""

import asyncio
import heapq
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import select

from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.runtime.containment import report
from spmd_tx.coordinator.runtime.folder_names import folder_name
from spmd_tx.coordinator.storage.database import Database
from spmd_tx.coordinator.storage.outages import OUTAGES
from spmd_tx.coordinator.storage.tables import PastRequest, RequestRow, SessionRow
from spmd_tx.errors import NotFound

logger = logging.getLogger(__name__)

FOLDER = "traces"  # in the data directory
MAX_REQUESTS = 200_000  # of one trace, the newest
READ_AT_ONCE = 500  # while nothing else runs
BUILDERS = 2  # traces that are built at a time
FRESH_SECONDS = 10.0  # up to this age a trace is served again
PATIENCE_SECONDS = 2.0  # for a small trace in the same call; the SDK asks again after 5 seconds
KEPT_SECONDS = 2 * 3600.0  # longer than its URL is valid

STAGES = ("queued", "batched", "device", "encoded")

Event = dict[str, Any]


class TracedRequest(NamedTuple):
    """Holds what the log knows of a request. Times are in seconds since the epoch; None: not reached."""

    number: int
    kind: str
    line: str
    seq_id: int
    created_at: float
    began_at: float | None
    sent_at: float | None
    replied_at: float | None
    finished_at: float | None
    tokens: int | None
    category: str | None  # of a failure


def write(requests: Sequence[TracedRequest], now: float, about: dict[str, Any]) -> Iterator[bytes]:
    """The file, piece by piece, with ``about`` in its header. Unfinished requests last until ``now``."""
    yield b'{"otherData":' + msgspec.json.encode(about) + b',"traceEvents":[\n'
    separator = b""
    for event in events(requests, now):
        yield separator + msgspec.json.encode(event)
        separator = b",\n"
    yield b"\n]}\n"


def events(requests: Iterable[TracedRequest], now: float) -> Iterator[Event]:
    """The trace events, in any order. Times are whole microseconds, so that slices nest exactly."""
    by_line: dict[str, list[TracedRequest]] = {}
    for request in sorted(requests, key=lambda each: (each.created_at, each.number)):
        by_line.setdefault(request.line, []).append(request)
    for process, (line, of_line) in enumerate(sorted(by_line.items()), 1):
        yield _meta("process_name", process, 0, name=line)
        yield _meta("process_sort_index", process, 0, sort_index=process)
        lanes: list[tuple[int, int]] = []  # when each is free again, and its number
        for request in of_line:
            begin, *ends = boundaries(request, now)
            lane = heapq.heappop(lanes)[1] if lanes and lanes[0][0] <= begin else len(lanes) + 1
            if lane == len(lanes) + 1:
                yield _meta("thread_name", process, lane, name=f"lane {lane}")
            heapq.heappush(lanes, (ends[-1], lane))
            yield from _slices(request, begin, ends, process, lane)


def _slices(request: TracedRequest, begin: int, ends: list[int], process: int, lane: int) -> Iterator[Event]:
    place = {"ph": "X", "pid": process, "tid": lane, "cat": request.kind}
    details = {
        "seq_id": request.seq_id,
        "number": request.number,
        "tokens": request.tokens,
        "failed": request.category,
        "unfinished": request.finished_at is None or None,
    }
    yield place | {
        "name": f"{request.kind} {request.seq_id}",
        "ts": begin,
        "dur": ends[-1] - begin,
        "args": {name: value for name, value in details.items() if value is not None},
    }
    if request.finished_at is None:
        return
    for stage, end in zip(STAGES, ends, strict=True):
        if end > begin:
            yield place | {"name": stage, "ts": begin, "dur": end - begin}
        begin = end


def boundaries(request: TracedRequest, now: float) -> list[int]:
    """The times in microseconds where the stages begin, and where the last one ends; never decreasing.

    A stage that a request never reached has no length: if it failed in its line, it was queued to its end.
    """
    finished = now if request.finished_at is None else request.finished_at
    times = [request.created_at, request.began_at, request.sent_at, request.replied_at]
    boundaries = [int(request.created_at * 1e6)]
    last = int(max(finished, request.created_at) * 1e6)
    for moment in times[1:]:
        reached = last if moment is None else int(moment * 1e6)
        boundaries.append(min(max(reached, boundaries[-1]), last))
    return [*boundaries, last]


def _meta(what: str, process: int, lane: int, **details: object) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": lane, "args": details}


@dataclass(frozen=True)
class Export:
    """Says how far the trace of a session is."""

    path: Path | None = None  # None: not yet
    error: str | None = None  # why there will be none; asking again tries again


class TraceExports:
    """Builds traces, one at a time for each owner: a large one takes seconds, and 100 MB of memory."""

    def __init__(self, database: Database, data_dir: Path) -> None:
        self._database = database
        self._folder = data_dir / FOLDER
        self._building: dict[str, asyncio.Task[None]] = {}  # by session
        self._owners: set[str] = set()  # whose traces are being built
        self._has_builder = asyncio.Semaphore(BUILDERS)
        self._errors: dict[str, str] = {}  # not reported yet; by session

    async def export(self, session: SessionRow) -> Export:
        """Begin to build a trace, or say how far it is."""
        path = self.path(session.id)
        if session.id not in self._building:
            error = self._errors.pop(session.id, None)
            if error is not None:
                return Export(error=error)
            if await asyncio.to_thread(_is_fresh, path):
                return Export(path)
        if session.id not in self._building and session.owner in self._owners:
            return Export()  # the client asks again, and its turn comes
        building = self._building.get(session.id) or self._start(session, path)
        await asyncio.wait([building], timeout=PATIENCE_SECONDS)
        if not building.done():
            return Export()
        error = self._errors.pop(session.id, None)
        return Export(path) if error is None else Export(error=error)

    def _start(self, session: SessionRow, path: Path) -> asyncio.Task[None]:
        self._owners.add(session.owner)
        building = self._building[session.id] = asyncio.create_task(self._build(session, path))
        building.add_done_callback(lambda _: self._ended(session))
        return building

    def _ended(self, session: SessionRow) -> None:
        del self._building[session.id]
        self._owners.discard(session.owner)

    def path(self, session_id: str) -> Path:
        return self._folder / f"{folder_name(session_id)}.pftrace"

    async def file(self, session: SessionRow) -> Path:
        """The file of a trace that was built. Raises NotFound when it is deleted by now."""
        path = self.path(session.id)
        if not await asyncio.to_thread(path.exists):
            raise NotFound(f"the trace of session {session.id!r} is no longer kept; export it again")
        return path

    async def _build(self, session: SessionRow, path: Path) -> None:
        try:
            async with self._has_builder:
                requests = await self._requests(session.id)
                about = {
                    "session_id": session.id,
                    "display_name": session.display_name,
                    "sdk_version": session.sdk_version,
                    "requests": len(requests),
                }
                await asyncio.to_thread(_write, path, requests, clock.now(), about)
        except OUTAGES as error:
            logger.warning("the trace of session %s was not built: %s", session.id, error)
            self._errors[session.id] = "the server's storage does not answer; try again"
        except BaseException as error:
            self._errors[session.id] = report(error, f"the trace of session {session.id}")

    async def _requests(self, session_id: str) -> list[TracedRequest]:
        requests: list[TracedRequest] = []
        async with self._database.reading() as db:
            for table in (RequestRow, PastRequest):
                columns = [getattr(table, name) for name in TracedRequest._fields]
                query = select(*columns).where(table.session_id == session_id)
                rows = await db.stream(query.order_by(table.number.desc()).limit(MAX_REQUESTS))
                async for part in rows.partitions(READ_AT_ONCE):
                    requests += [TracedRequest(*row) for row in part]
        return await asyncio.to_thread(_newest, requests)


def old_files(data_dir: Path, now: float) -> list[Path]:
    """The traces that have outlived their URLs. Blocks."""
    before = min(time.time(), now) - KEPT_SECONDS
    return [path for path in (data_dir / FOLDER).glob("*") if path.stat().st_mtime < before]


def _newest(requests: list[TracedRequest]) -> list[TracedRequest]:
    """Return each request once: one that moved while its session was read was found twice."""
    return sorted(set(requests), key=lambda each: each.number)[-MAX_REQUESTS:]


def _is_fresh(path: Path) -> bool:
    try:
        return path.stat().st_mtime > time.time() - FRESH_SECONDS
    except FileNotFoundError:
        return False


def _write(path: Path, requests: list[TracedRequest], now: float, about: dict[str, object]) -> None:
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("wb") as file:
        file.writelines(write(requests, now, about))
    unfinished.replace(path)
