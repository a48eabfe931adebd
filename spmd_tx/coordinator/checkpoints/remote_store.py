"""The checkpoint store in an object store, or wherever fsspec reaches, and its local cache. Methods block.

RUN/KIND/NAME/checkpoint.json is the manifest; the folder beside it that is named by the manifest's version
holds the files. Files are uploaded first and the manifest last: at that moment the checkpoint appears, or is
replaced. Remains of an interruption are deleted at the next start.
"""

import logging
import os
import shutil
import threading
import time
import uuid
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias
from weakref import WeakValueDictionary

import msgspec

from spmd_tx.byte_sizes import parse_size
from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.checkpoints import files
from spmd_tx.coordinator.checkpoints.files import MANIFEST, Manifest
from spmd_tx.coordinator.checkpoints.remote_files import RemoteFiles
from spmd_tx.coordinator.checkpoints.store import LocalStore, OpenCheckpoint, matching
from spmd_tx.coordinator.storage.disk import size_of
from spmd_tx.coordinator.wire.checkpoint_paths import KINDS, CheckpointPath
from spmd_tx.durable_files import write_file
from spmd_tx.errors import UNREADABLE, InvalidRequest

logger = logging.getLogger(__name__)

IN_USE_SECONDS = 600.0  # for which a cached checkpoint may still have to be linked after it was fetched
THREADS = 8
PLACE_PARTS = 3  # RUN/KIND/NAME


class CheckpointCache(LocalStore):
    """Keeps checkpoint folders in a local directory. Who needs one for longer must link its files."""

    def __init__(self, directory: Path, most_bytes: int) -> None:
        super().__init__(directory)
        self._most_bytes = most_bytes

    def has(self, path: CheckpointPath, manifest: Manifest) -> bool:
        """Whether exactly this version is cached and intact. A damaged one is dropped."""
        present = self.manifest(path)
        if present is None or present.version != manifest.version:
            return False
        try:
            files.verify(path, self.folder(path))
        except InvalidRequest:
            self.delete(path)
            return False
        os.utime(self.folder(path) / MANIFEST)
        return True

    def evict(self, besides: CheckpointPath) -> None:
        """Delete the least recently used checkpoints beyond the capacity, except ``besides``."""
        folders = (folder for kind in KINDS for folder in self._directory.glob(f"*/{kind}/[!.]*"))
        complete = (folder for folder in folders if (folder / MANIFEST).exists())
        used_at = {folder: (folder / MANIFEST).stat().st_mtime for folder in complete}
        total, retained = 0, {self.folder(besides)}
        for folder in sorted(used_at, key=lambda folder: used_at[folder], reverse=True):
            total += size_of(folder)
            is_used = folder in retained or used_at[folder] > time.time() - IN_USE_SECONDS
            if total > self._most_bytes and not is_used:
                files.delete(folder)


class RemoteStore:
    """Stores the checkpoints of one server under a base URL; nobody else writes there."""

    def __init__(self, remote: RemoteFiles, cache: CheckpointCache) -> None:
        self.threads = ThreadPoolExecutor(THREADS, "checkpoint-store")
        self._remote = remote
        self._cache = cache
        self._locks: WeakValueDictionary[CheckpointPath, threading.Lock] = WeakValueDictionary()
        self._guard = threading.Lock()

    def stage(self, path: CheckpointPath) -> Path:
        return self._cache.stage(path)

    def commit(self, path: CheckpointPath, staged: Path, manifest: Manifest) -> None:
        manifest = files.with_digests(staged, manifest)
        with self._alone(path):
            self._upload(path, staged, manifest)
            self._cache.commit(path, staged, manifest)
            self._cache.evict(path)
            try:
                self._sweep(_place(path), self._remote.sizes(_place(path)), manifest)
            except OSError as error:
                logger.warning("the earlier version of %s stays until the next start: %s", path, error)

    def manifest(self, path: CheckpointPath) -> Manifest | None:
        return self._read(_place(path))

    def beginning_so(self, path: CheckpointPath) -> list[CheckpointPath]:
        return matching(path, self._remote.folders(), self.manifest)

    def fetch(self, path: CheckpointPath) -> OpenCheckpoint:
        with self._alone(path):
            manifest = self.manifest(path)
            if manifest is None:
                raise InvalidRequest(
                    f"checkpoint {path} is incomplete: its {MANIFEST} is not in the store; use another one"
                )
            if not self._cache.has(path, manifest):
                self._download(path, manifest)
                self._cache.evict(path)
            return OpenCheckpoint(self._cache.folder(path), manifest)

    def read(self, path: CheckpointPath, manifest: Manifest, name: str, start: int, size: int) -> bytes:
        content = self._remote.read(f"{_place(path)}/{manifest.version}/{name}", start, start + size)
        if len(content) != size:
            raise OSError(f"{path}: {name} has another size than when it was written")
        return content

    def change(self, path: CheckpointPath, **values: object) -> None:
        with self._alone(path):
            manifest = self.manifest(path)
            if manifest is not None:
                changed = msgspec.structs.replace(manifest, **values)
                self._remote.write(f"{_place(path)}/{MANIFEST}", msgspec.json.encode(changed))
                self._cache.change(path, **values)

    def delete(self, path: CheckpointPath) -> None:
        with self._alone(path):
            with suppress(FileNotFoundError):
                self._remote.delete(f"{_place(path)}/{MANIFEST}")
            for file in self._remote.sizes(_place(path)):
                self._remote.delete(file)
            self._cache.delete(path)

    def tidy(self, listed: Collection[CheckpointPath]) -> dict[CheckpointPath, Manifest]:
        """As LocalStore.tidy. Known checkpoints that are only cached predate this store: upload them."""
        cached, places = self._cache.tidy(listed), self._by_place()
        for place, names in places.items():
            if f"{place}/{MANIFEST}" not in names:
                self._sweep(place, names, None)
        complete: dict[CheckpointPath, Manifest] = {}
        for (place, names), manifest in zip(
            places.items(), self.threads.map(self._read, places), strict=True
        ):
            if manifest is not None:
                self._sweep(place, names, manifest)
                _, kind, name = place.split("/")
                complete[CheckpointPath(manifest.run_id, kind, name)] = manifest
        for path in cached.keys() - complete.keys():
            if path in listed:
                logger.info("checkpoint %s is only here, and moves to %s", path, self._remote.url)
                self._upload(path, self._cache.folder(path), cached[path])
                complete[path] = cached[path]
            else:
                self._cache.delete(path)
        return complete

    def _by_place(self) -> dict[str, list[str]]:
        """The files of each checkpoint, without files that are no checkpoint's."""
        names: dict[str, list[str]] = {}
        for file in self._remote.sizes():
            parts = file.split("/")
            if len(parts) > PLACE_PARTS and parts[1] in KINDS:
                names.setdefault("/".join(parts[:PLACE_PARTS]), []).append(file)
        return names

    def _read(self, place: str) -> Manifest | None:
        """The manifest; None when it is missing or damaged."""
        try:
            return msgspec.json.decode(self._remote.read(f"{place}/{MANIFEST}"), type=Manifest)
        except (FileNotFoundError, *UNREADABLE):
            return None

    def _upload(self, path: CheckpointPath, folder: Path, manifest: Manifest) -> None:
        for name in sorted(manifest.files):
            self._remote.upload(folder / name, f"{_place(path)}/{manifest.version}/{name}")
        self._remote.write(f"{_place(path)}/{MANIFEST}", msgspec.json.encode(manifest))

    def _download(self, path: CheckpointPath, manifest: Manifest) -> None:
        folder = self._cache.folder(path)
        partial = folder.with_name(f".{folder.name}.fetched")  # no name of one that is being saved
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name in sorted(manifest.files):
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            try:
                self._remote.download(f"{_place(path)}/{manifest.version}/{name}", partial / name)
            except FileNotFoundError:
                shutil.rmtree(partial)
                raise InvalidRequest(
                    f"checkpoint {path} is damaged: {name} is not in the store; use another checkpoint"
                ) from None
        (partial / MANIFEST).write_bytes(msgspec.json.encode(manifest))
        files.verify(path, partial)
        self._cache.commit(path, partial, manifest)

    def _sweep(self, place: str, names: Iterable[str], manifest: Manifest | None) -> None:
        """Delete the files that do not belong to the present version."""
        current = None if manifest is None else f"{place}/{manifest.version}/"
        for file in names:
            if current is None or not (file.startswith(current) or file == f"{place}/{MANIFEST}"):
                with suppress(FileNotFoundError):
                    self._remote.delete(file)

    def _alone(self, path: CheckpointPath) -> threading.Lock:
        """Return the lock of a checkpoint, which lives for as long as it is held or awaited."""
        with self._guard:
            return self._locks.setdefault(path, threading.Lock())


def _place(path: CheckpointPath) -> str:
    return f"{path.run_folder}/{path.kind}/{path.name}"


def open_remote_store(url: str, data_dir: Path, cache: CheckpointCache) -> RemoteStore:
    """Raises StartError when the base cannot be used; a base that does not answer now may do so later."""
    remote = RemoteFiles(url)
    try:
        remote.own(server_id(data_dir))
    except ConnectionError as error:
        logger.error("--checkpoints-base: %s; named checkpoints wait until it does", error)
    return RemoteStore(remote, cache)


def server_id(data_dir: Path) -> str:
    """The id of a data directory, which is made when there is none."""
    file = data_dir / "server_id"
    if not file.exists():
        write_file(file, uuid.uuid4().hex.encode())
    return file.read_text()


CheckpointStore: TypeAlias = LocalStore | RemoteStore


def open_store(config: ServerConfig) -> CheckpointStore:
    """Open the place of named checkpoints. Blocks. Raises StartError."""
    base = config.checkpoints_base
    if base is None or "://" not in base:
        return LocalStore(config.checkpoints_dir)
    cache = CheckpointCache(config.checkpoints_dir, parse_size(config.max_checkpoint_cache, whole=0))
    return open_remote_store(base, config.data_dir, cache)
