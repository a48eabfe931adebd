"""Saves, finds, copies, expires and deletes checkpoints. Each has a folder in the store and a row."""

import asyncio
import logging
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from sqlalchemy import ColumnElement, and_, delete, func, not_, or_, select, update

from spmd_tx.byte_sizes import show_size
from spmd_tx.coordinator.checkpoints import files
from spmd_tx.coordinator.checkpoints.checkpoint_base import CheckpointBase
from spmd_tx.coordinator.checkpoints.files import FORMATS, Manifest
from spmd_tx.coordinator.checkpoints.lifetimes import check_ttl, expiry, is_expired
from spmd_tx.coordinator.checkpoints.remote_store import CheckpointStore
from spmd_tx.coordinator.checkpoints.store import OpenCheckpoint
from spmd_tx.coordinator.storage.database import Database
from spmd_tx.coordinator.storage.disk import DiskGuard
from spmd_tx.coordinator.storage.tables import LOCAL_OWNER, CheckpointRow, ModelRow, SessionRow
from spmd_tx.coordinator.wire import checkpoint_paths
from spmd_tx.coordinator.wire.checkpoint_paths import WEIGHTS, CheckpointPath
from spmd_tx.errors import InvalidRequest, NotFound
from spmd_tx.protocol.commands import AdapterSpec

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Visible = Callable[[CheckpointRow], bool]  # whether a caller may know of a checkpoint

GIVEN_UP_SECONDS = 60.0  # after which lost workers have ended for certain


class SaveOptions(NamedTuple):
    """Holds a client's options for a checkpoint."""

    overwrite: bool = False
    ttl_seconds: int | None = None  # None: for ever
    user_metadata: dict[str, Any] | None = None
    request_id: str | None = None  # of the request, which may overwrite its own checkpoint when it runs again
    owner: str | None = None  # None: the owner of the model, whose rows are there
    seq_id: int | None = None  # of the request, which says behind which steps of its run; None: of no run


class CheckpointCatalog:
    """Keeps the rows of checkpoints in step with the store."""

    def __init__(
        self,
        database: Database,
        store: CheckpointStore,
        storage: DiskGuard,
        most_bytes: int = 0,
    ) -> None:
        """``most_bytes`` bounds the checkpoints of one owner; 0: no bound."""
        self._most_bytes = most_bytes
        self._database = database
        self._storage = storage
        self._store = store
        self.changes = 0  # of rows, in this process
        self._staged: dict[CheckpointPath, Path] = {}  # begun, but not complete

    async def begin(self, path: CheckpointPath, options: SaveOptions) -> Path:
        """Begin to save. The result is where the workers may write the checkpoint.

        Raises InvalidRequest when it may not be saved, and OSError while the disk is too full: workers that
        found it full would be lost.
        """
        self._storage.require_space()
        checkpoint_paths.check_new_name(path.name)
        check_ttl(options.ttl_seconds)
        present = await self._row(path)
        is_in_the_way = present is not None and not options.overwrite and not is_expired(present)
        if is_in_the_way and not await self._is_saved_by(path, options.request_id):
            raise InvalidRequest(f"checkpoint {path} exists; choose another name, or {_way_out(path)}")
        if self._most_bytes:
            await self._check_quota(options.owner or await self._owner(path.run_id), besides=path)
        self._discard_later(self._staged.get(path))
        staged = self._staged[path] = await self._do(self._store.stage, path)
        return staged

    async def complete(
        self,
        path: CheckpointPath,
        staged: Path,
        adapter: AdapterSpec,
        options: SaveOptions,
        base: CheckpointBase,
    ) -> Manifest:
        """Publish a written checkpoint under its name. May be called again when the database failed.

        A checkpoint that is overwritten is public no more, nor the best of its run.
        """
        manifest = await self._do(self._store.manifest, path)
        earlier = manifest if manifest is not None and manifest.saved_by == options.request_id else None
        is_new = await asyncio.to_thread(files.is_to_be_published, staged, options.request_id)
        if manifest is None or earlier is None or is_new:
            sizes = await asyncio.to_thread(files.sizes, staged)
            owner = options.owner or await self._owner(path.run_id)
            manifest = _new_manifest(path, sizes, adapter, options, base, owner)
            if earlier is not None and options.request_id is not None:
                kept = {"is_public": earlier.is_public, "is_best": earlier.is_best}
                manifest = msgspec.structs.replace(manifest, **kept)
            await self._do(self._store.commit, path, staged, manifest)
        await self._list(path, manifest)
        self._staged.pop(path, None)
        return manifest

    def _discard_later(self, staged: Path | None) -> None:
        """Delete what a failed attempt has left, later: lost workers may still write there for a while."""
        if staged is not None:
            loop = asyncio.get_running_loop()
            delete = partial(shutil.rmtree, staged, ignore_errors=True)
            loop.call_later(GIVEN_UP_SECONDS, lambda: loop.run_in_executor(None, delete))

    async def copy(self, source: CheckpointPath, target: CheckpointPath, options: SaveOptions) -> None:
        """Copy a checkpoint to another name; both share the files. Copying again changes nothing.

        Raises NotFound, and InvalidRequest when it is damaged or when the name is taken.
        """
        present = await self._do(self._store.manifest, target)
        if present is not None and present.copied_from == str(source):
            await self._list(target, present)
            return
        opened = await self.open(source, None, may_be_encrypted=True)
        staged = await self.begin(target, options)
        shared = await asyncio.to_thread(files.share, source, opened.folder, staged)
        now = time.time()
        manifest = msgspec.structs.replace(
            shared,
            run_id=target.run_id,
            created_at=now,
            expires_at=expiry(now, options.ttl_seconds),
            saved_by=options.request_id,
            owner=await self._owner(target.run_id),
            is_public=False,
            is_best=False,
            seq_id=None,
            copied_from=str(source),
        )
        await self._do(self._store.commit, target, staged, manifest)
        await self._list(target, manifest)
        self._staged.pop(target, None)

    async def _check_quota(self, owner: str, besides: CheckpointPath) -> None:
        """Raise InvalidRequest if the owner has too many bytes, not counting an overwritten checkpoint."""
        now = time.time()
        is_there = or_(CheckpointRow.expires_at.is_(None), CheckpointRow.expires_at > now)
        query = select(func.sum(CheckpointRow.size_bytes)).where(
            CheckpointRow.owner == owner, is_there, not_(_is(besides))
        )
        async with self._database.reading() as db:
            total = int(await db.scalar(query) or 0)
        if total >= self._most_bytes:
            raise InvalidRequest(
                f"the checkpoints of {owner!r} have {show_size(total)}, and one owner may have "
                f"{show_size(self._most_bytes)}; delete some, give them a time to live, or ask the operator "
                "to raise the limit checkpoint_bytes"
            )

    async def _list(self, path: CheckpointPath, manifest: Manifest) -> None:
        async with self._database.transaction() as db:
            await db.execute(delete(CheckpointRow).where(_is(path)))
            db.add(_new_row(path, manifest))
        self.changes += 1

    async def _owner(self, run_id: str) -> str:
        """The owner of the model."""
        query = (
            select(SessionRow.owner)
            .join(ModelRow, ModelRow.session_id == SessionRow.id)
            .where(ModelRow.id == run_id)
        )
        async with self._database.reading() as db:
            return await db.scalar(query) or LOCAL_OWNER

    async def _is_saved_by(self, path: CheckpointPath, request_id: str | None) -> bool:
        manifest = await self._do(self._store.manifest, path)
        return request_id is not None and manifest is not None and manifest.saved_by == request_id

    async def find(self, path: CheckpointPath, is_visible: Visible = lambda _: True) -> CheckpointRow:
        """The row of a checkpoint. Raises NotFound, also for one that is not visible."""
        row = await self._row(path)
        if row is not None and not is_visible(row):
            row = None
        if row is None or is_expired(row):
            state = "does not exist" if row is None else "has expired"
            raise NotFound(
                f"checkpoint {path} {state}; RestClient.list_user_checkpoints() lists those that can be used"
            )
        return row

    async def check_meant(self, path: CheckpointPath, is_visible: Visible) -> None:
        """Raise InvalidRequest if a client that quotes no names may mean another checkpoint by this path.

        Such a client sends the address of "final" for "final#2", which earlier versions took as a name.
        """
        is_misread = or_(*(CheckpointRow.name.contains(sign, autoescape=True) for sign in "#?%"))
        query = select(CheckpointRow).where(
            CheckpointRow.run_id == path.run_id, CheckpointRow.kind == path.kind
        )
        async with self._database.reading() as db:
            rows = (await db.scalars(query.where(is_misread, CheckpointRow.name != path.name))).all()
        for row in rows:
            if checkpoint_paths.as_read_in_a_url(row.name) == path.name and is_visible(row):
                raise InvalidRequest(
                    f"this asks for {path}, but the SDK, which quotes no names, asks so for {row.name!r}, "
                    f"too; delete that one first, as {checkpoint_paths.quoted(_path(row))}"
                )

    async def describe(self, path: CheckpointPath, is_visible: Visible = lambda _: True) -> Manifest:
        """The manifest of a checkpoint, without reading its files. Raises as ``open`` does."""
        await self.find(path, is_visible)
        manifest = await self._do(self._store.manifest, path)
        return files.checked(path, manifest)

    def read(self, path: CheckpointPath, manifest: Manifest, name: str, start: int, size: int) -> bytes:
        """Read a part of a file of exactly this version. Blocks. Raises OSError when it is gone by now."""
        return self._store.read(path, manifest, name, start, size)

    async def open(
        self,
        path: CheckpointPath,
        base: CheckpointBase | None,
        is_visible: Visible = lambda _: True,
        *,
        may_be_encrypted: bool = False,
    ) -> OpenCheckpoint:
        """Fetch a checkpoint that models of a base can load; None: it will not be loaded.

        Raises NotFound or InvalidRequest.
        """
        await self.find(path, is_visible)
        opened = await self._do(self._store.fetch, path)
        if opened.manifest.is_encrypted and not may_be_encrypted:
            raise InvalidRequest(
                f"the files of checkpoint {path} are encrypted to the keys that its save named; "
                "use a checkpoint that was saved without age_encryption_recipients"
            )
        if base is not None:
            await self._do(base.check, path, opened)
        return opened

    async def set_ttl(self, path: CheckpointPath, ttl_seconds: int | None) -> None:
        check_ttl(ttl_seconds)
        await self._change(path, expires_at=expiry(time.time(), ttl_seconds))

    async def set_public(self, path: CheckpointPath, is_public: bool) -> None:
        await self._change(path, is_public=is_public)

    async def set_best(self, path: CheckpointPath, is_best: bool) -> None:
        """Mark a checkpoint as the best of its run, in place of another one, or take its mark away."""
        await self.find(path)
        of_run = CheckpointRow.run_id == path.run_id
        async with self._database.transaction() as db:
            marked = (await db.scalars(select(CheckpointRow).where(of_run, CheckpointRow.is_best))).all()
            is_it = _is(path)
            changed = update(CheckpointRow).where(of_run) if is_best else update(CheckpointRow).where(is_it)
            await db.execute(changed.values(is_best=is_it if is_best else False))
        self.changes += 1
        for each in {path, *(map(_path, marked) if is_best else ())}:
            await self._change_manifest(each, is_best=is_best and each == path)

    async def delete(self, path: CheckpointPath) -> None:
        await self.find(path)
        await self._delete(path)

    async def expire(self, now: float) -> list[CheckpointPath]:
        """Delete the expired checkpoints, and return their paths."""
        async with self._database.reading() as db:
            rows = (await db.scalars(select(CheckpointRow).where(CheckpointRow.expires_at <= now))).all()
        expired = []
        for path in map(_path, rows):
            try:
                await self._delete(path)
                expired.append(path)
            except OSError as error:  # the store does not answer; the rest of the server goes on
                logger.warning("cannot delete checkpoint %s now: %s", path, error)
        return expired

    async def reconcile(self) -> None:
        """Make the rows equal to the folders at start, since a crash may have come between the two."""
        async with self._database.reading() as db:
            paths = {_path(row) for row in await db.scalars(select(CheckpointRow))}
        complete = await self._do(self._store.tidy, paths)
        async with self._database.transaction() as db:
            listed = {_path(row): row for row in (await db.scalars(select(CheckpointRow))).all()}
            for path in listed.keys() - complete.keys():
                await db.delete(listed[path])
            for path in listed.keys() & complete.keys():
                listed[path].base_model = complete[path].base_model
            db.add_all(_new_row(path, complete[path]) for path in complete.keys() - listed.keys())

    async def _delete(self, path: CheckpointPath) -> None:
        await self._do(self._store.delete, path)
        async with self._database.transaction() as db:
            await db.execute(delete(CheckpointRow).where(_is(path)))
        self.changes += 1

    async def _change(self, path: CheckpointPath, **values: object) -> None:
        await self.find(path)
        async with self._database.transaction() as db:
            await db.execute(update(CheckpointRow).where(_is(path)).values(values))
        self.changes += 1
        await self._change_manifest(path, **values)

    async def _change_manifest(self, path: CheckpointPath, **values: object) -> None:
        """Change the manifest like the row, so that rows can be made again from the folders."""
        await self._do(partial(self._store.change, path, **values))

    async def _do(self, work: Callable[..., Result], *arguments: object) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._store.threads, work, *arguments)

    async def _row(self, path: CheckpointPath) -> CheckpointRow | None:
        if "\0" in path.run_id:  # PostgreSQL refuses to look for it
            return None
        async with self._database.reading() as db:
            return await db.scalar(select(CheckpointRow).where(_is(path)))


async def open_checkpoints(
    database: Database, store: CheckpointStore, storage: DiskGuard, most_bytes: int = 0
) -> CheckpointCatalog:
    """Open the catalog of a store; parameters as in CheckpointCatalog."""
    checkpoints = CheckpointCatalog(database, store, storage, most_bytes)
    try:
        await checkpoints.reconcile()
    except ConnectionError as error:
        logger.error("the checkpoints cannot be listed; assuming that they have not changed: %s", error)
    return checkpoints


def _new_manifest(
    path: CheckpointPath,
    sizes: dict[str, int],
    adapter: AdapterSpec,
    options: SaveOptions,
    base: CheckpointBase,
    owner: str,
) -> Manifest:
    """Describe a checkpoint that is complete now."""
    now = time.time()
    return Manifest(
        run_id=path.run_id,
        base_model=base.name,
        **msgspec.structs.asdict(adapter),
        format=FORMATS[adapter.optimizer],
        created_at=now,
        expires_at=expiry(now, options.ttl_seconds),
        user_metadata=options.user_metadata,
        files=sizes,
        saved_by=options.request_id,
        owner=owner,
        seq_id=options.seq_id,
        expert_lora=base.expert_lora,
    )


def _path(row: CheckpointRow) -> CheckpointPath:
    return CheckpointPath(row.run_id, row.kind, row.name)


def _way_out(path: CheckpointPath) -> str:
    """Say how the SDK frees a name; of its saves, only that of training states can overwrite."""
    free = "delete that one first: RestClient().delete_checkpoint_from_tinker_path(path)"
    return f"call save_state with overwrite=True, or {free}" if path.kind == WEIGHTS else free


def _is(path: CheckpointPath) -> ColumnElement[bool]:
    return and_(
        CheckpointRow.run_id == path.run_id, CheckpointRow.kind == path.kind, CheckpointRow.name == path.name
    )


def _new_row(path: CheckpointPath, manifest: Manifest) -> CheckpointRow:
    return CheckpointRow(
        **path._asdict(),
        size_bytes=manifest.size_bytes,
        user_metadata=manifest.user_metadata,
        created_at=manifest.created_at,
        expires_at=manifest.expires_at,
        owner=manifest.owner,
        is_public=manifest.is_public,
        base_model=manifest.base_model,
        seq_id=manifest.seq_id,
        is_best=manifest.is_best,
    )
