"""Writes files and folders that survive a power failure, and swaps folders. All functions block.

A file's name is part of its folder: until the folder is synced, a power failure may lose the name, even if
the file itself was synced.
"""

import ctypes
import errno
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

AT_FDCWD = -100
RENAME_EXCHANGE = 2
CANNOT_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


def sync(path: Path) -> None:
    """Make a file's content, or a folder's names, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Make everything in a folder durable, and the folder itself, but not the folder's own name."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def sync_name(path: Path, base: Path) -> None:
    """Make a path's name durable, and the names of its parent folders up to ``base``."""
    for folder in path.parents:
        sync(folder)
        if folder == base:
            return


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents durably."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def write_file(path: Path, content: bytes) -> None:
    """Write or replace a file atomically and durably."""
    unfinished = path.with_name(f".{path.name}.tmp")
    unfinished.write_bytes(content)
    sync(unfinished)
    unfinished.rename(path)
    sync(path.parent)


def unique_beside(path: Path, suffix: str) -> Path:
    """Return a hidden name in the same folder that was never used and never will be."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.{suffix}")


def put_in_place(folder: Path, place: Path) -> Path | None:
    """Move ``folder`` to ``place`` durably. Returns the path of the folder that it replaced, to be deleted.

    If the system cannot exchange names, there is a moment in which ``place`` does not exist: readers must
    try again.
    """
    replaced = unique_beside(place, "deleted")
    try:
        if place.exists():
            if _exchange(folder, place):
                folder.rename(replaced)
                return replaced
            place.rename(replaced)
            folder.rename(place)
            return replaced
        folder.rename(place)
        return None
    finally:
        sync(place.parent)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Give a folder to write into, which takes the place of ``path`` durably when the block ends well.

    The block syncs what it writes. The folder's own name is new, since a process that was given up may still
    write. Blocks.
    """
    unfinished = unique_beside(path, "partial")
    try:
        make_folder(unfinished)
        yield unfinished
        replaced = put_in_place(unfinished, path)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names. Return False if the system, the C library or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if sys.platform != "linux" or renameat2 is None:
        return False
    paths = os.fsencode(one), os.fsencode(other)
    if renameat2(AT_FDCWD, paths[0], AT_FDCWD, paths[1], RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in CANNOT_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(one), None, str(other))
