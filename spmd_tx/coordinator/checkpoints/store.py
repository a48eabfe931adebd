"""The store of checkpoints in a local directory; remote_store.py has the other one. All methods block."""

import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from spmd_tx.coordinator.checkpoints import files
from spmd_tx.coordinator.checkpoints.files import Manifest
from spmd_tx.coordinator.wire.checkpoint_paths import CheckpointPath
from spmd_tx.errors import InvalidRequest

TRIES = 5  # to read a checkpoint that is overwritten again and again


class OpenCheckpoint(NamedTuple):
    """Holds a complete checkpoint."""

    folder: Path
    manifest: Manifest


def matching(
    path: CheckpointPath, folders: Iterable[str], manifest: Callable[[CheckpointPath], Manifest | None]
) -> list[CheckpointPath]:
    """Find the checkpoints of this kind and name in the folders of runs whose IDs begin with the path's."""
    runs = (folder for folder in sorted(folders) if folder.startswith(path.run_folder))
    named = (path._replace(run_id=folder) for folder in runs)
    found = (path._replace(run_id=known.run_id) for each in named if (known := manifest(each)) is not None)
    return [each for each in found if each.run_id.startswith(path.run_id)]


class LocalStore:
    """Stores checkpoints in a directory that all workers see, written beside their places and renamed.

    Methods of both stores raise OSError for outages, and for what the operator must mend.
    """

    threads: ThreadPoolExecutor | None = None  # to call the methods in; None: the default ones

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._moment = threading.Lock()  # held while one checkpoint takes the place of another

    def stage(self, path: CheckpointPath) -> Path:
        """Return a free place where the workers may write a checkpoint."""
        return files.prepare(self.folder(path))

    def commit(self, path: CheckpointPath, staged: Path, manifest: Manifest) -> None:
        """Put a written checkpoint in place of an earlier one of that name. May be repeated."""
        files.publish(staged, self.folder(path), manifest, self._moment)

    def manifest(self, path: CheckpointPath) -> Manifest | None:
        """Return the manifest; None when there is no complete checkpoint."""
        with self._moment:
            return files.read_manifest(self.folder(path))

    def beginning_so(self, path: CheckpointPath) -> list[CheckpointPath]:
        """Find complete checkpoints of this kind and name, of all runs whose IDs begin with the path's."""
        runs = (folder.name for folder in self._directory.iterdir()) if self._directory.is_dir() else ()
        return matching(path, runs, self.manifest)

    def fetch(self, path: CheckpointPath) -> OpenCheckpoint:
        """Get all files into a local folder, and verify them. Raises InvalidRequest if one is damaged.

        Here they are verified again if they are overwritten meanwhile, at last with a lock against that.
        """
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
        """Read a part of a file of exactly this version. Raises OSError when it is gone by now."""
        return files.read_part(self.folder(path), manifest, name, start, size)

    def change(self, path: CheckpointPath, **values: object) -> None:
        """Replace fields of the manifest."""
        with self._moment:
            files.change_manifest(self.folder(path), **values)

    def delete(self, path: CheckpointPath) -> None:
        """Delete a checkpoint, if it is there."""
        if self.folder(path).exists():
            files.delete(self.folder(path))

    def tidy(self, listed: Collection[CheckpointPath]) -> dict[CheckpointPath, Manifest]:
        """Finish or delete what was interrupted, and return the complete checkpoints.

        ``listed`` are those that have rows.
        """
        return files.tidy(self._directory)

    def _verified(self, path: CheckpointPath) -> OpenCheckpoint:
        folder = self.folder(path)
        return OpenCheckpoint(folder, files.verify(path, folder))

    def folder(self, path: CheckpointPath) -> Path:
        return path.folder(self._directory)
