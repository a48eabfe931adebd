"""Traces of sessions as files: built in the background, kept for a while, handed out by signed URLs."""

import asyncio
import logging
import time
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import select

from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.runtime.containment import report
from spmd_tx.coordinator.storage.database import Database
from spmd_tx.coordinator.storage.folders import folder_name
from spmd_tx.coordinator.storage.outages import OUTAGES
from spmd_tx.coordinator.storage.tables import PastRequest, RequestRow, Session
from spmd_tx.coordinator.trace_events import TracedRequest, write
from spmd_tx.errors import NotFound

logger = logging.getLogger(__name__)

FOLDER = "traces"  # in the data directory
MOST_REQUESTS = 200_000  # of one trace, the newest
FRESH_SECONDS = 10.0  # a trace that is not older is handed out once more
PATIENCE_SECONDS = 2.0  # a small one is ready in the same call; the SDK asks again after 5 seconds
KEPT_SECONDS = 2 * 3600.0  # longer than the URL is valid


@dataclass(frozen=True)
class Export:
    """How far the trace of a session is."""

    path: Path | None = None  # None: not yet
    error: str | None = None  # why there will be none; asking again tries again


class TraceExports:
    """Of one server. One at a time is built for a session."""

    def __init__(self, database: Database, data_dir: Path) -> None:
        self._database = database
        self._folder = data_dir / FOLDER
        self._building: dict[str, asyncio.Task[None]] = {}  # by session
        self._errors: dict[str, str] = {}  # not told yet; by session

    async def export(self, session: Session) -> Export:
        """Start to build a trace, or say how far it is."""
        path = self.path(session.id)
        if session.id not in self._building:
            error = self._errors.pop(session.id, None)
            if error is not None:
                return Export(error=error)
            if await asyncio.to_thread(_is_fresh, path):
                return Export(path)
        building = self._building.get(session.id) or self._start(session, path)
        await asyncio.wait([building], timeout=PATIENCE_SECONDS)
        if not building.done():
            return Export()
        error = self._errors.pop(session.id, None)
        return Export(path) if error is None else Export(error=error)

    def _start(self, session: Session, path: Path) -> asyncio.Task[None]:
        building = self._building[session.id] = asyncio.create_task(self._build(session, path))
        building.add_done_callback(lambda _: self._building.pop(session.id))
        return building

    def path(self, session_id: str) -> Path:
        return self._folder / f"{folder_name(session_id)}.pftrace"

    async def file(self, session: Session) -> Path:
        """A trace that was built. Raises NotFound when it was too long ago."""
        path = self.path(session.id)
        if not await asyncio.to_thread(path.exists):
            raise NotFound(f"the trace of session {session.id!r} is not kept any more; export it again")
        return path

    async def _build(self, session: Session, path: Path) -> None:
        try:
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
        found: list[TracedRequest] = []
        async with self._database.reading() as db:
            for table in (RequestRow, PastRequest):
                columns = [getattr(table, name) for name in TracedRequest._fields]
                query = select(*columns).where(table.session_id == session_id)
                rows = await db.execute(query.order_by(table.number.desc()).limit(MOST_REQUESTS))
                found += [TracedRequest(*row) for row in rows]
        return sorted(set(found), key=lambda each: each.number)[-MOST_REQUESTS:]


def old_files(data_dir: Path, now: float) -> list[Path]:
    """What nobody downloads any more. Blocks."""
    before = min(time.time(), now) - KEPT_SECONDS
    return [path for path in (data_dir / FOLDER).glob("*") if path.stat().st_mtime < before]


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
