"""The reaper: deletes rows, then files, that have outlived their use or that a crash left behind.

A server runs it at intervals; ``spmd-tx gc`` runs it on a directory without a server. A dry run reports what
would be deleted: it changes the database and rolls back.
"""

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy.ext.asyncio import AsyncSession

from spmd_tx.byte_sizes import parse_size, show_size
from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.catalog.catalog import model_id
from spmd_tx.coordinator.checkpoints import uploads
from spmd_tx.coordinator.requests import traces
from spmd_tx.coordinator.requests.payload_files import PayloadFiles
from spmd_tx.coordinator.requests.runs import run_metrics
from spmd_tx.coordinator.requests.sample_notes import KINDS, OF_OWNER, ROUTING, STABILITY, folder_of
from spmd_tx.coordinator.retention import rules
from spmd_tx.coordinator.retention.rules import Ages
from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.runtime.clock_guard import ClockGuard
from spmd_tx.coordinator.runtime.folder_names import folder_name
from spmd_tx.coordinator.runtime.metrics import RECLAIMED_BYTES
from spmd_tx.coordinator.sampling.stability_notes import KEPT_SECONDS
from spmd_tx.coordinator.storage.database import Database, check_exists, open_database
from spmd_tx.coordinator.storage.disk import modified_at, size_of
from spmd_tx.coordinator.tenancy import audit, stored_checkpoints, usage
from spmd_tx.coordinator.trajectories import catalog
from spmd_tx.errors import StartError
from spmd_tx.group_names import GROUPS_FOLDER

logger = logging.getLogger(__name__)

HOUR, DAY = 3600.0, 24 * 3600.0  # seconds
THINNED_AFTER_SECONDS = 7 * DAY  # without a step; then a run has fewer points
YOUNG_SECONDS = 3600.0  # a running server may still refer to files that are younger


@dataclass(frozen=True)
class Reaped:
    """Reports what was deleted, or would be."""

    kind: str
    count: int
    size: int  # bytes


@dataclass
class _Doomed:
    """Holds files and folders to delete once the database no longer refers to them."""

    kind: str
    paths: list[Path] = field(default_factory=list)

    def reaped(self) -> Reaped:
        return Reaped(self.kind, len(self.paths), sum(map(size_of, self.paths)))


class Reaper:
    """Deletes what one data directory and its database no longer need."""

    def __init__(
        self,
        database: Database,
        data_dir: Path,
        config: ServerConfig,
        pending: Callable[[], Collection[int]] = frozenset,
    ) -> None:
        """``config`` says what is kept for how long; ``pending`` returns files that rows will refer to."""
        self.clock = ClockGuard(data_dir)
        self._database = database
        self._data_dir = data_dir
        self._config = config
        self._pending = pending
        self._started_at = clock.now()
        self._unreferenced: set[int] = set()  # payload files, as of the last run

    async def reap(
        self,
        now: float | None = None,
        *,
        at_rest: bool = False,
        dry_run: bool = False,
        retire: Callable[[Mapping[str, str]], None] = lambda samplers: None,
    ) -> list[Reaped]:
        """Reap once. ``at_rest`` means that no server uses the directory now.

        Ages are counted up to ``now``; None: up to the time that can be trusted for deletions. ``retire``
        gives up the versions of samplers on the device.
        """
        if now is None:
            now = clock.now()
            if not dry_run:
                now = min(now, await asyncio.to_thread(self.clock.for_deletions))
        ages = self._ages(now)
        async with self._database.transaction() as db:  # the log is not written meanwhile
            savepoint = await db.begin_nested()
            reaped = await self._forget(db, ages)
            doomed = [
                await self._payload_files(db, at_rest),
                await self._snapshots(db, at_rest, now),
                await self._versions(db, at_rest, now),
                await self._notes(db, ROUTING, at_rest, now),
                await self._notes(db, STABILITY, at_rest, now),
                await self._old_stability(db, ages.now),
                await self._notes_of_turns(db, ages.now),
                await self._finished_uploads(db),
            ]
            superseded = await rules.superseded_versions(db, ages)
            if dry_run:
                await savepoint.rollback()
        doomed.append(await asyncio.to_thread(self._compilation_cache))
        unfinished = await asyncio.to_thread(uploads.expired, self._data_dir, now)
        doomed.append(_Doomed("uploads that were not finished", unfinished))
        doomed.append(_Doomed("traces", await asyncio.to_thread(traces.old_files, self._data_dir, now)))
        old = ["scratch", "idle_adapters", f"{GROUPS_FOLDER}/**/idle_adapters"] if at_rest else ["scratch"]
        doomed.append(_Doomed("old folders", [path for name in old for path in self._data_dir.glob(name)]))
        versions = self._data_dir / "versions"
        retired = [versions / folder_name(id) for id in superseded if (versions / folder_name(id)).exists()]
        doomed.append(_Doomed("superseded versions", retired))
        reaped += [await asyncio.to_thread(each.reaped) for each in doomed]
        if not dry_run:
            retire(superseded)
            left_to_others = set() if at_rest else {"superseded versions"}
            await asyncio.to_thread(_delete, [each for each in doomed if each.kind not in left_to_others])
            self._count(reaped)
        return [each for each in reaped if each.count]

    def _ages(self, now: float) -> Ages:
        """Time without a server does not count for those whose clients may come back."""
        runs_for = now - self._started_at
        results = max(self._config.keep_results_hours * HOUR, self._config.session_timeout)
        versions = self._config.keep_versions_hours * HOUR
        return Ages(
            now=now,
            results=now - results,
            open_results=now - results if runs_for >= results else 0.0,
            versions=now - versions if runs_for >= versions else 0.0,
        )

    async def _forget(self, db: AsyncSession, ages: Ages) -> list[Reaped]:
        config, now = self._config, ages.now
        forgotten = {
            "finished requests": await rules.forget_requests(db, ages),
            "results of requests that a replay needs": await rules.forget_results(db, ages),
            "images of requests that are gone": await rules.forget_images(db),
            "samplers of sessions that ended long ago": await rules.forget_samplers(db, ages),
            "trajectories, long unused": await catalog.forget(db, now - config.bounds.trajectory_days * DAY),
        }
        snapshots = await rules.forget_snapshots(db)
        await rules.forget_past_requests(db, ages)
        await usage.forget(db, now)
        await stored_checkpoints.forget(db, now)
        await audit.forget(db, now - config.keep_audit_days * DAY)
        await run_metrics.forget(db, now - config.keep_metrics_days * DAY, now - THINNED_AFTER_SECONDS)
        logger.debug("%d snapshots belonged to models that are not in use", snapshots)
        return [Reaped(kind, count, 0) for kind, count in forgotten.items()]

    async def _payload_files(self, db: AsyncSession, at_rest: bool) -> _Doomed:
        """Find files that no row refers to; while a server runs, only those that none did last time."""
        referenced = await rules.payload_files(db) | set(self._pending())
        folder = self._data_dir / "payloads"
        present = await asyncio.to_thread(lambda: {int(path.stem): path for path in folder.glob("*.zst")})
        unreferenced = present.keys() - referenced
        doomed = unreferenced if at_rest else unreferenced & self._unreferenced
        self._unreferenced = unreferenced - doomed
        leftovers = list(folder.glob("*.tmp")) if at_rest else []
        return _Doomed("payload files", [*(present[number] for number in sorted(doomed)), *leftovers])

    async def _snapshots(self, db: AsyncSession, at_rest: bool, now: float) -> _Doomed:
        snapshots = self._data_dir / "snapshots"
        in_use = {
            snapshots / folder_name(model_id) / str(seq_id) for model_id, seq_id in await rules.snapshots(db)
        }
        return await asyncio.to_thread(_unused, "snapshots", snapshots.glob("*/*"), in_use, at_rest, now)

    async def _versions(self, db: AsyncSession, at_rest: bool, now: float) -> _Doomed:
        versions = self._data_dir / "versions"
        in_use = {versions / folder_name(version) for version in await rules.versions_in_use(db)}
        kind = "versions of ended sessions"
        return await asyncio.to_thread(_unused, kind, versions.glob("*"), in_use, at_rest, now)

    async def _notes(self, db: AsyncSession, kind: str, at_rest: bool, now: float) -> _Doomed:
        """Find notes of samples; a training request may name them while their session is in use."""
        folder = self._data_dir / kind
        in_use = {folder / folder_of(id) for id in await rules.sessions_in_use(db)}
        in_use |= set(folder.glob(f"{OF_OWNER}*"))
        unused = f"{kind} of samples of ended sessions"
        return await asyncio.to_thread(_unused, unused, folder.glob("*"), in_use, at_rest, now)

    async def _finished_uploads(self, db: AsyncSession) -> _Doomed:
        """Find uploads that have become checkpoints, which a server that was killed has not forgotten."""
        folders = await asyncio.to_thread(uploads.folders, self._data_dir)
        runs = {model_id(id, 0): folder for id, folder in folders.items()}
        saved = await rules.saved_runs(db, runs)
        return _Doomed("uploads that were finished", [runs[run] for run in sorted(saved)])

    async def _old_stability(self, db: AsyncSession, now: float) -> _Doomed:
        """Find notes that were unused for long and that no gradient to be replayed needs."""
        oldest = await rules.oldest_to_restore(db)
        limits = {
            folder_of(id): min(now - KEPT_SECONDS, oldest.get(id, now)) - YOUNG_SECONDS
            for id in await rules.sessions_in_use(db)
        }
        notes = (self._data_dir / STABILITY).glob("*/*")
        old = (path for path in notes if modified_at(path) < limits.get(path.parent.name, 0.0))
        return _Doomed("stability of samples, long unused", await asyncio.to_thread(list, old))

    async def _notes_of_turns(self, db: AsyncSession, now: float) -> _Doomed:
        """Find notes of turns that are gone, and that no gradient to be replayed needs."""
        oldest = min((await rules.oldest_to_restore(db)).values(), default=now)
        limit = min(now - KEPT_SECONDS, oldest) - YOUNG_SECONDS
        notes = (path for kind in KINDS for path in (self._data_dir / kind).glob(f"{OF_OWNER}*/*"))
        unused = await asyncio.to_thread(list, (path for path in notes if modified_at(path) < limit))
        kept = await catalog.turns_among(db, [path.stem for path in unused])
        return _Doomed("notes of turns that are gone", [path for path in unused if path.stem not in kept])

    def _compilation_cache(self) -> _Doomed:
        """Find the least recently used entries beyond the size limit. JAX touches entries that it uses."""
        entries: dict[str, list[Path]] = {}
        for pattern in ("compilation_cache/*", f"{GROUPS_FOLDER}/*/compilation_cache/*"):
            for path in self._data_dir.glob(pattern):
                entry = str(path).removesuffix("-atime").removesuffix("-cache")
                entries.setdefault(entry, []).append(path)
        newest_first = sorted(entries.values(), key=lambda paths: max(map(modified_at, paths)), reverse=True)
        total, doomed = 0, _Doomed("compilation cache")
        most = parse_size(self._config.max_compilation_cache, whole=0)
        for paths in newest_first:
            total += sum(map(size_of, paths))
            if total > most:
                doomed.paths += paths
        return doomed

    def _count(self, reaped: Iterable[Reaped]) -> None:
        for each in reaped:
            if each.size:
                logger.info("deleted %s: %d, %d bytes", each.kind, each.count, each.size)
                RECLAIMED_BYTES.labels(each.kind).inc(each.size)


def _unused(kind: str, folders: Iterable[Path], in_use: set[Path], at_rest: bool, now: float) -> _Doomed:
    """Return the folders that are not ``in_use``; while a server runs, without young ones."""
    before = min(time.time(), now) - YOUNG_SECONDS
    others = (path for path in folders if path not in in_use)
    return _Doomed(kind, [path for path in others if at_rest or modified_at(path) < before])


def _delete(doomed: Iterable[_Doomed]) -> None:
    for path in [path for each in doomed for path in each.paths]:
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("cannot delete %s: %s", path, error)


async def collect(
    data_dir: Path, database_url: str | None, config: ServerConfig, dry_run: bool
) -> list[Reaped]:
    """Reap a data directory. Raises StartError when a server uses it or its database."""
    if not os.path.isdir(data_dir):
        raise StartError(f"--data-dir {data_dir} does not exist; name the one of the server")
    check_exists(database_url, data_dir)
    database = await open_database(database_url, data_dir)
    try:
        with closing(await asyncio.to_thread(PayloadFiles, data_dir / "payloads")):
            reaper = Reaper(database, data_dir.absolute(), config)
            # The operator can see what goes (--dry-run), so the clock is trusted.
            return await reaper.reap(clock.now(), at_rest=True, dry_run=dry_run)
    finally:
        await database.close()


def table(reaped: Sequence[Reaped]) -> str:
    """Format kinds, counts and sizes in columns, with the sum."""
    rows = [("", "count", "size")]
    rows += [(each.kind, str(each.count), show_size(each.size) if each.size else "") for each in reaped]
    rows.append(("in all", "", show_size(sum(each.size for each in reaped))))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        f"{kind:<{widths[0]}}  {count:>{widths[1]}}  {size:>{widths[2]}}" for kind, count, size in rows
    )
