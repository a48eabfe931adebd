"""A second name for a checkpoint's files, for readers who must not lose them when it is deleted. Blocks."""

import os
import shutil
from pathlib import Path

from spmd_tx.coordinator import checkpoint_files
from spmd_tx.coordinator.checkpoint_files import CheckpointPath, Manifest
from spmd_tx.errors import InvalidRequest


def link(path: CheckpointPath, folder: Path, place: Path) -> Manifest:
    """Link a complete checkpoint's files as the new folder ``place``, and check that all are there."""
    partial = place.with_name(f".{place.name}.partial")
    for leftover in (partial, place):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        shutil.copytree(folder, partial, copy_function=_link_or_copy)
    except (FileNotFoundError, shutil.Error):
        raise InvalidRequest(
            f"checkpoint {path} was deleted while it was being opened; use another one"
        ) from None
    manifest = checkpoint_files.verify(path, partial)
    partial.rename(place)
    return manifest


def share(folder: Path, partial: Path) -> None:
    """Link a complete checkpoint's files into a new folder that is to become a checkpoint of its own."""
    ours = shutil.ignore_patterns(checkpoint_files.MANIFEST, f".{checkpoint_files.MANIFEST}.tmp")
    shutil.copytree(folder, partial, copy_function=_link_or_copy, ignore=ours)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # not every file system has links
        shutil.copy2(source, target)
