"""Where named checkpoints are: in a directory, or elsewhere (remote_checkpoints.py). All methods block."""

import threading
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol

from spmd_tx.coordinator.checkpoints import files
from spmd_tx.coordinator.checkpoints.files import Manifest
from spmd_tx.coordinator.wire.checkpoint_paths import CheckpointPath
from spmd_tx.errors import InvalidRequest

TRIES = 5  # to read a checkpoint that is overwritten again and again


class OpenCheckpoint(NamedTuple):
    """A complete checkpoint."""

    folder: Path
    manifest: Manifest


class CheckpointStore(Protocol):
    """Raises OSError for what may work later (patience.py), and for what its operator must mend."""

    @property
    def threads(self) -> ThreadPoolExecutor | None:
        """To call the methods in; None: those of everybody."""
        ...

    def stage(self, path: CheckpointPath) -> Path:
        """Where the workers may write a checkpoint. The place is free."""
        ...

    def commit(self, path: CheckpointPath, staged: Path, manifest: Manifest) -> None:
        """Put what was written in place of an earlier checkpoint of that name. May be done again."""
        ...

    def manifest(self, path: CheckpointPath) -> Manifest | None:
        """None when there is no complete checkpoint."""
        ...

    def fetch(self, path: CheckpointPath) -> OpenCheckpoint:
        """All files in a local folder, each compared with its digest. Raises InvalidRequest if damaged."""
        ...

    def read(self, path: CheckpointPath, manifest: Manifest, name: str, start: int, size: int) -> bytes:
        """A part of a file of just this version. Raises OSError when it is gone meanwhile."""
        ...

    def change(self, path: CheckpointPath, **values: object) -> None:
        """Replace fields of the manifest."""
        ...

    def delete(self, path: CheckpointPath) -> None:
        """What is not there is deleted."""
        ...

    def tidy(self, known: Collection[CheckpointPath]) -> dict[CheckpointPath, Manifest]:
        """End what was interrupted; the complete checkpoints. ``known`` are those that were so before."""
        ...


class LocalStore:
    """A directory that all workers see. A checkpoint is written beside its place, and renamed."""

    threads: ThreadPoolExecutor | None = None

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._moment = threading.Lock()  # in which one checkpoint takes the place of another

    def stage(self, path: CheckpointPath) -> Path:
        return files.prepare(self._folder(path))

    def commit(self, path: CheckpointPath, staged: Path, manifest: Manifest) -> None:
        files.publish(staged, self._folder(path), manifest, self._moment)

    def manifest(self, path: CheckpointPath) -> Manifest | None:
        with self._moment:
            return files.read_manifest(self._folder(path))

    def fetch(self, path: CheckpointPath) -> OpenCheckpoint:
        """One that is overwritten while it is read is read again, at last with nobody who could do so."""
        for _ in range(TRIES):
            before = self.manifest(path)
            try:
                return self._verified(path)
            except InvalidRequest:
                after = self.manifest(path)
                if before is None or after is None or before.version == after.version:
                    raise
        with self._moment:
            return self._verified(path)

    def read(self, path: CheckpointPath, manifest: Manifest, name: str, start: int, size: int) -> bytes:
        return files.read_part(self._folder(path), manifest, name, start, size)

    def change(self, path: CheckpointPath, **values: object) -> None:
        with self._moment:
            files.change_manifest(self._folder(path), **values)

    def delete(self, path: CheckpointPath) -> None:
        if self._folder(path).exists():
            files.delete(self._folder(path))

    def tidy(self, known: Collection[CheckpointPath]) -> dict[CheckpointPath, Manifest]:
        return files.tidy(self._directory)

    def _verified(self, path: CheckpointPath) -> OpenCheckpoint:
        folder = self._folder(path)
        return OpenCheckpoint(folder, files.verify(path, folder))

    def _folder(self, path: CheckpointPath) -> Path:
        return path.folder(self._directory)
