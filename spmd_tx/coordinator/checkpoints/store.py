"""The interface of checkpoint stores, and the store in a local directory. All methods block.

remote_store.py has the other one.
"""

import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol

from spmd_tx.coordinator.checkpoints import files
from spmd_tx.coordinator.checkpoints.files import Manifest
from spmd_tx.coordinator.wire.checkpoint_paths import CheckpointPath
from spmd_tx.errors import InvalidRequest

TRIES = 5  # to read a checkpoint that is overwritten again and again


class OpenCheckpoint(NamedTuple):
    """Holds a complete checkpoint."""

    folder: Path
    manifest: Manifest


class CheckpointStore(Protocol):
    """Stores named checkpoints. Methods raise OSError for outages, and for what the operator must mend."""

    @property
    def threads(self) -> ThreadPoolExecutor | None:
        """The threads to call the methods in; None: the default ones."""
        ...

    def stage(self, path: CheckpointPath) -> Path:
        """A free place where the workers may write a checkpoint."""
        ...

    def commit(self, path: CheckpointPath, staged: Path, manifest: Manifest) -> None:
        """Put a written checkpoint in place of an earlier one of that name. May be repeated."""
        ...

    def manifest(self, path: CheckpointPath) -> Manifest | None:
        """The manifest; None when there is no complete checkpoint."""
        ...

    def beginning_so(self, path: CheckpointPath) -> list[CheckpointPath]:
        """The complete checkpoints of this kind and name, of all runs whose IDs begin with the path's."""
        ...

    def fetch(self, path: CheckpointPath) -> OpenCheckpoint:
        """Get all files into a local folder, and verify them. Raises InvalidRequest if one is damaged."""
        ...

    def read(self, path: CheckpointPath, manifest: Manifest, name: str, start: int, size: int) -> bytes:
        """Read a part of a file of exactly this version. Raises OSError when it is gone by now."""
        ...

    def change(self, path: CheckpointPath, **values: object) -> None:
        """Replace fields of the manifest."""
        ...

    def delete(self, path: CheckpointPath) -> None:
        """Delete a checkpoint, if it is there."""
        ...

    def tidy(self, listed: Collection[CheckpointPath]) -> dict[CheckpointPath, Manifest]:
        """Finish or delete what was interrupted, and return the complete checkpoints.

        ``listed`` are those that have rows.
        """
        ...


def matching(
    path: CheckpointPath, folders: Iterable[str], manifest: Callable[[CheckpointPath], Manifest | None]
) -> list[CheckpointPath]:
    """Find the checkpoints of this kind and name in the folders of runs whose IDs begin with the path's."""
    runs = (folder for folder in sorted(folders) if folder.startswith(path.run_folder))
    named = (path._replace(run_id=folder) for folder in runs)
    found = (path._replace(run_id=known.run_id) for each in named if (known := manifest(each)) is not None)
    return [each for each in found if each.run_id.startswith(path.run_id)]


class LocalStore:
    """Stores checkpoints in a directory that all workers see, written beside their places and renamed."""

    threads: ThreadPoolExecutor | None = None

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._moment = threading.Lock()  # held while one checkpoint takes the place of another

    def stage(self, path: CheckpointPath) -> Path:
        return files.prepare(self._folder(path))

    def commit(self, path: CheckpointPath, staged: Path, manifest: Manifest) -> None:
        files.publish(staged, self._folder(path), manifest, self._moment)

    def manifest(self, path: CheckpointPath) -> Manifest | None:
        with self._moment:
            return files.read_manifest(self._folder(path))

    def beginning_so(self, path: CheckpointPath) -> list[CheckpointPath]:
        runs = (folder.name for folder in self._directory.iterdir()) if self._directory.is_dir() else ()
        return matching(path, runs, self.manifest)

    def fetch(self, path: CheckpointPath) -> OpenCheckpoint:
        """Verify the files; again if they are overwritten meanwhile, and at last with a lock against that."""
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

    def tidy(self, listed: Collection[CheckpointPath]) -> dict[CheckpointPath, Manifest]:
        return files.tidy(self._directory)

    def _verified(self, path: CheckpointPath) -> OpenCheckpoint:
        folder = self._folder(path)
        return OpenCheckpoint(folder, files.verify(path, folder))

    def _folder(self, path: CheckpointPath) -> Path:
        return path.folder(self._directory)
