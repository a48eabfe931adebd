"""Local copies of checkpoints that are kept elsewhere: the ones that were used last. All functions block."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

from spmd_tx.coordinator import checkpoint_files
from spmd_tx.coordinator.checkpoint_files import MANIFEST, Manifest
from spmd_tx.coordinator.storage.disk import size_of
from spmd_tx.coordinator.wire.checkpoint_paths import KINDS, CheckpointPath
from spmd_tx.errors import InvalidRequest

IN_USE_SECONDS = 600.0  # after a copy was asked for, it may still have to be linked


class CheckpointCache:
    """Checkpoint folders, as a local store has them. Whoever needs one for longer has links of their own."""

    def __init__(self, directory: Path, most_bytes: int) -> None:
        self._directory = directory
        self._most_bytes = most_bytes

    def folder(self, path: CheckpointPath) -> Path:
        return path.folder(self._directory)

    def has(self, path: CheckpointPath, manifest: Manifest) -> bool:
        """Whether just this version is here, whole. One that is damaged is given up."""
        folder = self.folder(path)
        present = checkpoint_files.read_manifest(folder)
        if present is None or present.version != manifest.version:
            return False
        try:
            checkpoint_files.verify(path, folder)
        except InvalidRequest:
            self.drop(path)
            return False
        os.utime(folder / MANIFEST)
        return True

    def drop(self, path: CheckpointPath) -> None:
        if self.folder(path).exists():
            checkpoint_files.delete(self.folder(path))

    def make_room(self, besides: CheckpointPath) -> None:
        """Delete those that were unused for longest, beyond what all may take."""
        used_at = {folder: (folder / MANIFEST).stat().st_mtime for folder in self._folders()}
        total, kept = 0, {self.folder(besides)}
        for folder in sorted(used_at, key=lambda folder: used_at[folder], reverse=True):
            total += size_of(folder)
            is_used = folder in kept or used_at[folder] > time.time() - IN_USE_SECONDS
            if total > self._most_bytes and not is_used:
                checkpoint_files.delete(folder)

    def tidy(self) -> dict[CheckpointPath, Manifest]:
        """Delete what was interrupted; what is here."""
        return checkpoint_files.tidy(self._directory)

    def _folders(self) -> Iterator[Path]:
        for kind in KINDS:
            for folder in self._directory.glob(f"*/{kind}/[!.]*"):
                if (folder / MANIFEST).exists():
                    yield folder
