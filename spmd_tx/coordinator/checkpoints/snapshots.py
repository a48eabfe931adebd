"""Snapshots of models: which there are, and when the next one is taken.

A snapshot is a model's state right behind one of its requests. It only shortens a restoration: the
requests behind it are run again. The two newest ones of each model are kept, should one be damaged. A
snapshot behind a request that has no answer yet cannot be started from, and does not count.

Workers write it beside its place, under a name that workers of other generations do not know; it is moved
when its files are complete.
"""

import asyncio
import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from sqlalchemy import ColumnElement, delete, exists, insert, select
from sqlalchemy.orm import aliased

from spmd_tx.coordinator.runtime import metrics
from spmd_tx.coordinator.runtime.folder_names import folder_name
from spmd_tx.coordinator.storage.database import Database
from spmd_tx.coordinator.storage.folders import is_intact, write_manifest
from spmd_tx.coordinator.storage.tables import RequestRow, SnapshotRow
from spmd_tx.durable_files import put_in_place, unique_beside
from spmd_tx.protocol.commands import AdapterSpec
from spmd_tx.protocol.reports import Written

logger = logging.getLogger(__name__)

KEPT = 2  # of each model


@dataclass(frozen=True)
class StoredSnapshot:
    """The state that a restoration starts from."""

    seq_id: int
    path: Path
    optimizer: bool
    adapter: AdapterSpec


@dataclass
class Snapshots:
    """The snapshots on disk, and the one that is being taken: one at a time."""

    database: Database
    directory: Path  # absolute; workers write there
    seconds_between: float  # at least, for each model
    clock: Callable[[], float]
    _taken_at: dict[str, float] = field(default_factory=dict)  # by model
    _behind: dict[str, int] = field(default_factory=dict)  # by model: the request the newest one is behind
    _staged: dict[tuple[str, int], Path] = field(default_factory=dict)  # by model and seq_id
    _writing: dict[str, asyncio.Future[str | None]] = field(default_factory=dict)  # by path

    def is_due(self, model_id: str) -> bool:
        """Whether a snapshot should be taken of a model that has just made a step."""
        due_at = self._taken_at.setdefault(model_id, self.clock()) + self.seconds_between
        return not self._writing and self.clock() >= due_at

    def is_behind(self, model_id: str, seq_id: int) -> bool:
        """Whether a model's newest snapshot holds all up to this request."""
        return self._behind.get(model_id, -1) >= seq_id

    def place(self, model_id: str, seq_id: int) -> Path:
        return self.directory / folder_name(model_id) / str(seq_id)

    def staged(self, model_id: str, seq_id: int) -> Path:
        """Where the snapshot that was begun last is written."""
        return self._staged[model_id, seq_id]

    def begin(self, model_id: str, seq_id: int) -> asyncio.Future[str | None]:
        """Expect the files of a snapshot: None when they are complete, or what went wrong."""
        path = self._staged[model_id, seq_id] = unique_beside(self.place(model_id, seq_id), "staged")
        self._taken_at[model_id] = self.clock()
        written: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._writing[str(path)] = written
        written.add_done_callback(lambda _: self._writing.pop(str(path)))
        return written

    def written(self, report: Written) -> None:
        """A worker reports the end of a snapshot."""
        written = self._writing.get(report.path)
        if written is not None and not written.done():
            written.set_result(report.error)

    def abandon(self) -> None:
        """The workers are gone: what they were writing will never be complete."""
        self._staged.clear()
        for written in list(self._writing.values()):
            if not written.done():
                written.set_result("the workers were lost")

    async def record(
        self, model_id: str, seq_id: int, path: Path, adapter: AdapterSpec, *, optimizer: bool = True
    ) -> None:
        """Make a complete folder, staged or in place, count, and give up the model's older snapshots."""
        self._staged.pop((model_id, seq_id), None)
        place = self.place(model_id, seq_id)
        size = await asyncio.to_thread(self._seal, path, place)
        this_one = (SnapshotRow.model_id == model_id, SnapshotRow.seq_id == seq_id)
        async with self.database.transaction() as db:
            await db.execute(delete(SnapshotRow).where(*this_one))
            values = {
                "model_id": model_id,
                "seq_id": seq_id,
                "path": str(place),
                "optimizer": optimizer,
                "adapter": msgspec.to_builtins(adapter),
                "created_at": time.time(),
                "size_bytes": size,
            }
            await db.execute(insert(SnapshotRow).values(values))
            up_to_here = SnapshotRow.seq_id <= seq_id  # when a load is run again there are newer ones
            newest_first = (
                select(SnapshotRow)
                .where(SnapshotRow.model_id == model_id, up_to_here, counts())
                .order_by(SnapshotRow.seq_id.desc())
            )
            outdated = (await db.scalars(newest_first)).all()[KEPT:]
            for row in outdated:
                await db.delete(row)
        self._behind[model_id] = seq_id
        metrics.SNAPSHOT_SECONDS.observe(self.clock() - self._taken_at.get(model_id, self.clock()))
        for row in outdated:
            await asyncio.to_thread(shutil.rmtree, self.place(model_id, row.seq_id), ignore_errors=True)

    def _seal(self, path: Path, place: Path) -> int:
        """Blocks. The result is the size in bytes."""
        write_manifest(path, self.directory.parent)
        if path != place:
            replaced = put_in_place(path, place)
            if replaced is not None:
                shutil.rmtree(replaced)
        return _size(place)

    async def newest(self, model_id: str, before: int | None) -> tuple[StoredSnapshot | None, str | None]:
        """The newest good snapshot behind a request earlier than ``before``; else why there is none."""
        query = select(SnapshotRow).where(SnapshotRow.model_id == model_id, is_of_what_happened())
        async with self.database.reading() as db:
            rows = (await db.scalars(query.order_by(SnapshotRow.seq_id.desc()))).all()
        rows = [row for row in rows if before is None or row.seq_id < before]
        problems = []
        for row in rows:
            path = self.place(model_id, row.seq_id)  # the data directory may have been moved
            problem = await asyncio.to_thread(is_intact, path)
            if problem is None:
                adapter = msgspec.convert(row.adapter, AdapterSpec)
                return StoredSnapshot(row.seq_id, path, row.optimizer, adapter), None
            logger.error("snapshot %s of %s cannot be used: %s", path, model_id, problem)
            problems.append(f"{path}: {problem}")
        is_complete = len(rows) < KEPT  # no request was forgotten yet, so that all can be run again
        return None, None if is_complete else "; ".join(problems)


def counts() -> ColumnElement[bool]:
    """Of a SnapshotRow: whether everything up to the request that it is behind has been answered."""
    request = aliased(RequestRow)
    is_unanswered = (request.line == SnapshotRow.model_id, request.finished_at.is_(None))
    is_answered = ~exists().where(*is_unanswered, request.seq_id <= SnapshotRow.seq_id)
    return is_answered & is_of_what_happened()


def is_of_what_happened() -> ColumnElement[bool]:
    """Of a SnapshotRow: not that of a load that had failed in the end, and had no effect."""
    request = aliased(RequestRow)
    is_its_own = (request.line == SnapshotRow.model_id, request.seq_id == SnapshotRow.seq_id)
    return ~exists().where(*is_its_own, request.finished_at.is_not(None), ~request.executed)


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
