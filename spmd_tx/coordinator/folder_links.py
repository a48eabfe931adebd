"""A second name for a checkpoint's files, for readers who must not lose them when it is deleted. Blocks."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from spmd_tx.coordinator import checkpoint_files
from spmd_tx.coordinator.checkpoint_files import Manifest
from spmd_tx.coordinator.wire.checkpoint_paths import CheckpointPath
from spmd_tx.errors import InvalidRequest

TRIES = 100  # a checkpoint is overwritten once in the time that it takes to write one
Ignore = Callable[[str, list[str]], set[str]]


def link(path: CheckpointPath, folder: Path, place: Path) -> Manifest:
    """Link a complete checkpoint's files as the new folder ``place``, and check that all are there.

    The manifest is that of the files: the checkpoint may have been overwritten since it was opened.
    """
    partial = place.with_name(f".{place.name}.partial")
    shutil.rmtree(place, ignore_errors=True)
    _copy(path, folder, partial, lambda *_: set())
    manifest = checkpoint_files.verify(path, partial)
    partial.rename(place)
    return manifest


def share(path: CheckpointPath, folder: Path, partial: Path) -> Manifest:
    """Link a complete checkpoint's files into a new folder that is to become a checkpoint of its own.

    The manifest is that of the files, as above.
    """
    ours = shutil.ignore_patterns(checkpoint_files.MANIFEST, f".{checkpoint_files.MANIFEST}.tmp")
    return _copy(path, folder, partial, ours)


def _copy(path: CheckpointPath, folder: Path, partial: Path, ignore: Ignore) -> Manifest:
    """Copy, from the start again if the checkpoint is overwritten meanwhile."""
    for _ in range(TRIES):
        shutil.rmtree(partial, ignore_errors=True)
        before = checkpoint_files.read_manifest(folder)
        try:
            shutil.copytree(folder, partial, copy_function=_link_or_copy, ignore=ignore)
        except (FileNotFoundError, shutil.Error):
            continue
        after = checkpoint_files.read_manifest(folder)
        if before is not None and after is not None and before.version == after.version:
            return after
    raise InvalidRequest(f"checkpoint {path} was deleted while it was being opened; use another one")


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # not every file system has links
        shutil.copy2(source, target)
