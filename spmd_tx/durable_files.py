"""Files and folders that outlive a loss of power, and folders that replace others. All functions block.

A file's name is part of its folder: until that is synced, the name may be gone after a loss of power,
whatever was done with the file.
"""

import ctypes
import errno
import os
import secrets
import sys
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
    """The same for everything in a folder, and for itself; not for its own name."""
    for path in folder.rglob("*"):
        sync(path)
    sync(folder)


def sync_name(path: Path, base: Path) -> None:
    """Make a name durable, and those of the folders around it that are in ``base``."""
    for folder in path.parents:
        sync(folder)
        if folder == base:
            return


def make_folder(path: Path) -> None:
    """Make a folder, and those around it that are missing, for good."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def write_file(path: Path, content: bytes) -> None:
    """Write a file, or replace it; nobody ever sees half of it."""
    unfinished = path.with_name(f".{path.name}.tmp")
    unfinished.write_bytes(content)
    sync(unfinished)
    unfinished.rename(path)
    sync(path.parent)


def unique_beside(path: Path, suffix: str) -> Path:
    """A hidden name beside another one that nobody has used, nor will."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.{suffix}")


def put_in_place(folder: Path, place: Path) -> Path | None:
    """Give a folder the name of another one, or a free one; what it has replaced is returned, to be deleted.

    Where the kernel cannot exchange names there is a moment without any: who reads must try again.
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


def _exchange(one: Path, other: Path) -> bool:
    """False if system, C library or file system do not know how."""
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
