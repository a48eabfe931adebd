"""Saved checkpoints: begin, complete, find, expire, delete. A folder on disk and a row for each."""

import asyncio
import time
from pathlib import Path
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, delete, select, update

from spmd_tx.coordinator import checkpoint_files
from spmd_tx.coordinator.checkpoint_files import CheckpointPath, Manifest
from spmd_tx.coordinator.database import Database
from spmd_tx.coordinator.storage import Storage
from spmd_tx.coordinator.tables import Checkpoint
from spmd_tx.errors import InvalidRequest, NotFound
from spmd_tx.protocol import AdapterSpec

MAX_TTL_SECONDS = 10 * 366 * 24 * 3600  # ten years, as in the SDK


class SaveOptions(NamedTuple):
    """What a client says about a checkpoint it wants."""

    overwrite: bool = False
    ttl_seconds: int | None = None  # None: for ever
    user_metadata: dict[str, Any] | None = None
    request_id: str | None = None  # which, carried out once more, may overwrite what it has saved itself


class OpenCheckpoint(NamedTuple):
    """A complete checkpoint."""

    folder: Path
    manifest: Manifest


class CheckpointCatalog:
    """All checkpoints of this server."""

    def __init__(
        self, database: Database, directory: Path, base_model: str, storage: Storage | None = None
    ) -> None:
        self._database = database
        self._storage = storage or Storage(directory)
        self._directory = directory
        self._base_model = base_model

    async def begin(self, path: CheckpointPath, options: SaveOptions) -> Path:
        """Where the workers may write the checkpoint. Raises InvalidRequest when it may not be saved.

        Raises OSError while there is no room: workers that found the disk full would be lost.
        """
        self._storage.require_room()
        checkpoint_files.check_name("a checkpoint", path.name)
        _check_ttl(options.ttl_seconds)
        present = await self._row(path)
        is_in_the_way = present is not None and not options.overwrite and not _is_expired(present)
        if is_in_the_way and not await self._is_saved_by(path, options.request_id):
            raise InvalidRequest(
                f"checkpoint {path} exists; choose another name, or save with overwrite=True"
            )
        return await asyncio.to_thread(checkpoint_files.prepare, path.folder(self._directory))

    async def complete(
        self, path: CheckpointPath, partial: Path, adapter: AdapterSpec, options: SaveOptions
    ) -> None:
        """Make a written checkpoint the one of its name. May be called again when the database failed."""
        folder = path.folder(self._directory)
        manifest = await asyncio.to_thread(checkpoint_files.read_manifest, folder)
        if manifest is None or manifest.saved_by != options.request_id or partial.exists():
            files = await asyncio.to_thread(checkpoint_files.sizes, partial)
            manifest = self._manifest(path, adapter, options, files)
            await asyncio.to_thread(checkpoint_files.publish, partial, folder, manifest)
        async with self._database.transaction() as db:
            await db.execute(delete(Checkpoint).where(*_is(path)))
            db.add(_new_row(path, manifest))

    def _manifest(
        self, path: CheckpointPath, adapter: AdapterSpec, options: SaveOptions, files: dict[str, int]
    ) -> Manifest:
        now = time.time()
        return Manifest(
            run_id=path.run_id,
            base_model=self._base_model,
            rank=adapter.rank,
            alpha=adapter.alpha,
            train_attn=adapter.train_attn,
            train_mlp=adapter.train_mlp,
            train_unembed=adapter.train_unembed,
            created_at=now,
            expires_at=None if options.ttl_seconds is None else now + options.ttl_seconds,
            user_metadata=options.user_metadata,
            files=files,
            saved_by=options.request_id,
        )

    async def _is_saved_by(self, path: CheckpointPath, request_id: str | None) -> bool:
        manifest = await asyncio.to_thread(checkpoint_files.read_manifest, path.folder(self._directory))
        return request_id is not None and manifest is not None and manifest.saved_by == request_id

    async def find(self, path: CheckpointPath) -> Checkpoint:
        row = await self._row(path)
        if row is None or _is_expired(row):
            state = "does not exist" if row is None else "has expired"
            raise NotFound(
                f"checkpoint {path} {state}; RestClient.list_user_checkpoints() lists those that can be used"
            )
        return row

    async def open(self, path: CheckpointPath) -> OpenCheckpoint:
        """A checkpoint that can be loaded here. Raises NotFound, or InvalidRequest when it is unusable."""
        await self.find(path)
        folder = path.folder(self._directory)
        manifest = await asyncio.to_thread(checkpoint_files.verify, path, folder)
        if manifest.base_model != self._base_model:
            raise InvalidRequest(
                f"checkpoint {path} was trained on {manifest.base_model!r}, and this server serves "
                f"{self._base_model!r}; use a checkpoint of this model"
            )
        return OpenCheckpoint(folder, manifest)

    async def set_ttl(self, path: CheckpointPath, ttl_seconds: int | None) -> None:
        _check_ttl(ttl_seconds)
        await self.find(path)
        expires_at = None if ttl_seconds is None else time.time() + ttl_seconds
        await self._change(path, expires_at=expires_at)

    async def set_public(self, path: CheckpointPath, is_public: bool) -> None:
        await self.find(path)
        await self._change(path, is_public=is_public)

    async def delete(self, path: CheckpointPath) -> None:
        await self.find(path)
        await self._delete(path)

    async def expire(self, now: float) -> list[CheckpointPath]:
        """Delete what has outlived its time."""
        async with self._database.reading() as db:
            rows = (await db.scalars(select(Checkpoint).where(Checkpoint.expires_at <= now))).all()
        expired = [CheckpointPath(row.run_id, row.kind, row.name) for row in rows]
        for path in expired:
            await self._delete(path)
        return expired

    async def reconcile(self) -> None:
        """Make the rows say what the folders say. At start: a crash may have come between the two."""
        complete = await asyncio.to_thread(checkpoint_files.tidy, self._directory)
        async with self._database.transaction() as db:
            rows = (await db.scalars(select(Checkpoint))).all()
            listed = {CheckpointPath(row.run_id, row.kind, row.name): row for row in rows}
            for path in listed.keys() - complete.keys():
                await db.delete(listed[path])
            db.add_all(_new_row(path, complete[path]) for path in complete.keys() - listed.keys())

    async def _delete(self, path: CheckpointPath) -> None:
        folder = path.folder(self._directory)
        if folder.exists():
            await asyncio.to_thread(checkpoint_files.delete, folder)
        async with self._database.transaction() as db:
            await db.execute(delete(Checkpoint).where(*_is(path)))

    async def _change(self, path: CheckpointPath, **values: object) -> None:
        async with self._database.transaction() as db:
            await db.execute(update(Checkpoint).where(*_is(path)).values(values))

    async def _row(self, path: CheckpointPath) -> Checkpoint | None:
        async with self._database.reading() as db:
            return await db.scalar(select(Checkpoint).where(*_is(path)))


async def open_checkpoints(
    database: Database, directory: Path, base_model: str, storage: Storage | None = None
) -> CheckpointCatalog:
    checkpoints = CheckpointCatalog(database, directory, base_model, storage)
    await checkpoints.reconcile()
    return checkpoints


def _is(path: CheckpointPath) -> tuple[ColumnElement[bool], ...]:
    return Checkpoint.run_id == path.run_id, Checkpoint.kind == path.kind, Checkpoint.name == path.name


def _check_ttl(ttl_seconds: int | None) -> None:
    if ttl_seconds is not None and not 1 <= ttl_seconds <= MAX_TTL_SECONDS:
        raise InvalidRequest(
            f"ttl_seconds is {ttl_seconds}; it must be between 1 and {MAX_TTL_SECONDS}, or null to keep it"
        )


def _is_expired(row: Checkpoint) -> bool:
    return row.expires_at is not None and row.expires_at <= time.time()


def _new_row(path: CheckpointPath, manifest: Manifest) -> Checkpoint:
    return Checkpoint(
        run_id=path.run_id,
        kind=path.kind,
        name=path.name,
        size_bytes=manifest.size_bytes,
        user_metadata=manifest.user_metadata,
        created_at=manifest.created_at,
        expires_at=manifest.expires_at,
    )
