"""Keeps snapshots of models, and decides when the next one is due.

A snapshot is a checkpoint that the server takes for itself: a model's state after one of its requests. It
shortens a restoration, since only later requests are run again. The two newest of each model are kept, in
case one is damaged. A snapshot after a request that has no answer yet does not count: nothing is restored
from it.

Workers write a snapshot beside its place, under a name that other generations of workers do not know; it is
moved when its files are complete.
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

from spmd_tx.coordinator.checkpoints.writes import Writes, Writing
from spmd_tx.coordinator.runtime import metrics
from spmd_tx.coordinator.runtime.folder_names import folder_name
from spmd_tx.coordinator.storage.database import Database
from spmd_tx.coordinator.storage.disk import size_of
from spmd_tx.coordinator.storage.folders import is_intact, write_manifest
from spmd_tx.coordinator.storage.tables import RequestRow, SnapshotRow
from spmd_tx.durable_files import put_in_place, unique_beside
from spmd_tx.errors import MeshError
from spmd_tx.protocol.commands import AdapterSpec

logger = logging.getLogger(__name__)

KEPT = 2  # of each model
BYTES_PER_SECOND = 100e6  # that snapshots of a model write on average, at most


@dataclass(frozen=True)
class StoredSnapshot:
    """Describes the snapshot that a restoration starts from."""

    seq_id: int  # of the last request in it
    path: Path
    optimizer: bool  # whether the optimizer's moments are restored, too
    adapter: AdapterSpec


@dataclass
class Snapshots:
    """Manages the snapshots on disk, and the one that is being taken: one at a time."""

    database: Database
    directory: Path  # absolute; workers write there
    seconds_between: float  # at least, between two snapshots of a model
    clock: Callable[[], float]
    writes: Writes = field(default_factory=Writes)
    _taken_at: dict[str, float] = field(default_factory=dict)  # by model
    _size: dict[str, int] = field(default_factory=dict)  # by model: bytes of its newest snapshot
    _newest: dict[str, int] = field(default_factory=dict)  # by model: the last request in the newest one
    _staged: dict[tuple[str, int], Path] = field(default_factory=dict)  # by model and seq_id
    _writing: set[Writing] = field(default_factory=set)

    def is_due(self, model_id: str) -> bool:
        """Whether to take a snapshot of a model that has just made a step."""
        seconds = max(self.seconds_between, self._size.get(model_id, 0) / BYTES_PER_SECOND)
        due_at = self._taken_at.setdefault(model_id, self.clock()) + seconds
        return not self._writing and self.clock() >= due_at

    def is_behind(self, model_id: str, seq_id: int) -> bool:
        """Whether a model's newest snapshot includes this request."""
        return self._newest.get(model_id, -1) >= seq_id

    def place(self, model_id: str, seq_id: int) -> Path:
        return self.directory / folder_name(model_id) / str(seq_id)

    def staged(self, model_id: str, seq_id: int) -> Path:
        """Where the snapshot that was begun is written."""
        return self._staged[model_id, seq_id]

    def begin(self, model_id: str, seq_id: int) -> Writing:
        """Expect the files of a snapshot."""
        path = self._staged[model_id, seq_id] = unique_beside(self.place(model_id, seq_id), "staged")
        self._taken_at[model_id] = self.clock()
        writing = self.writes.expect(path)
        self._writing.add(writing)
        writing.add_done_callback(self._writing.discard)
        return writing

    def abandon(self, error: MeshError) -> None:
        """Fail all writing, also that of others: the workers are lost."""
        self._staged.clear()
        self.writes.abandon(error)

    async def record(
        self, model_id: str, seq_id: int, path: Path, adapter: AdapterSpec, *, optimizer: bool = True
    ) -> None:
        """Seal a complete folder, staged or in place, add its row, and delete the model's outdated ones."""
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
            up_to_here = SnapshotRow.seq_id <= seq_id  # newer ones exist when a load is run again
            newest_first = (
                select(SnapshotRow)
                .where(SnapshotRow.model_id == model_id, up_to_here, counts())
                .order_by(SnapshotRow.seq_id.desc())
            )
            outdated = (await db.scalars(newest_first)).all()[KEPT:]
            for row in outdated:
                await db.delete(row)
        self._newest[model_id], self._size[model_id] = seq_id, size
        seconds = self.clock() - self._taken_at.get(model_id, self.clock())
        metrics.SNAPSHOT_SECONDS.labels(metrics.group()).observe(seconds)
        for row in outdated:
            await asyncio.to_thread(shutil.rmtree, self.place(model_id, row.seq_id), ignore_errors=True)

    def _seal(self, path: Path, place: Path) -> int:
        """Seal the folder and move it into place. Blocks. The result is the size in bytes."""
        write_manifest(path, self.directory.parent)
        if path != place:
            replaced = put_in_place(path, place)
            if replaced is not None:
                shutil.rmtree(replaced)
        return size_of(place)

    async def newest(self, model_id: str, before: int | None) -> tuple[StoredSnapshot | None, str | None]:
        """The newest intact snapshot from before a request (None: of all); else why there is none."""
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
        is_complete = len(rows) < KEPT  # no request was deleted yet, so all can be run again
        return None, None if is_complete else "; ".join(problems)


def counts() -> ColumnElement[bool]:
    """The condition that a SnapshotRow's requests have all been answered, so that it counts."""
    request = aliased(RequestRow)
    is_unanswered = (request.line == SnapshotRow.model_id, request.finished_at.is_(None))
    is_answered = ~exists().where(*is_unanswered, request.seq_id <= SnapshotRow.seq_id)
    return is_answered & is_of_what_happened()


def is_of_what_happened() -> ColumnElement[bool]:
    """The condition that a SnapshotRow is not of a load that failed in the end and had no effect."""
    request = aliased(RequestRow)
    is_its_own = (request.line == SnapshotRow.model_id, request.seq_id == SnapshotRow.seq_id)
    return ~exists().where(*is_its_own, request.finished_at.is_not(None), ~request.executed)
