"""Seals folders with a manifest, and checks whether a sealed folder is still intact. All functions block.

The manifest holds the sizes and digests of all other files. It is written last, so a folder without one is
incomplete.
"""

from collections.abc import Mapping
from hashlib import blake2b, file_digest
from pathlib import Path

import msgspec

from spmd_tx.durable_files import sync_name, sync_tree, write_file
from spmd_tx.errors import UNREADABLE

MANIFEST = "contents.json"
FORMAT = 1  # raise it when older versions cannot read the folder; all earlier formats must stay readable


class FileEntry(msgspec.Struct, frozen=True):
    """Describes one file."""

    size: int  # bytes
    digest: str  # hexadecimal BLAKE2b of 16 bytes


class FolderManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Lists the files of a folder."""

    format: int = FORMAT
    files: dict[str, FileEntry]  # by path within the folder


class _Format(msgspec.Struct):
    """Reads only the format of a manifest, which this version may not understand."""

    format: int


def write_manifest(folder: Path, base: Path) -> None:
    """Make all files durable, then write the manifest; from then on the folder survives a crash.

    ``base`` is an enclosing folder whose own name is durable.
    """
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path != folder / MANIFEST]
    entries = {str(path.relative_to(folder)): FileEntry(path.stat().st_size, digest(path)) for path in paths}
    sync_tree(folder)
    write_file(folder / MANIFEST, msgspec.json.encode(FolderManifest(files=entries)))
    sync_name(folder, base)


def is_intact(folder: Path) -> str | None:
    """The first problem with a sealed folder; None when every file is there, byte for byte."""
    try:
        manifest = _read(folder)
        if isinstance(manifest, str):
            return manifest
        sizes = {name: entry.size for name, entry in manifest.files.items()}
        return difference(folder, sizes, {name: entry.digest for name, entry in manifest.files.items()})
    except (FileNotFoundError, NotADirectoryError) as error:
        return f"{error.filename} is missing"
    except OSError as error:
        return f"{error.filename or folder} cannot be read: {error.strerror}"


def difference(folder: Path, sizes: Mapping[str, int], digests: Mapping[str, str]) -> str | None:
    """The first difference of the files in a folder from their sizes, in bytes, and digests, if any."""
    for name, size in sizes.items():
        path = folder / name
        if (present := path.stat().st_size) != size:
            return f"{path} has {present} bytes instead of {size}"
    for name, written in digests.items():
        if digest(folder / name) != written:
            return f"{folder / name} has another content than when it was written"
    return None


def _read(folder: Path) -> FolderManifest | str:
    """The manifest, or what is wrong with it."""
    path = folder / MANIFEST
    content = path.read_bytes()
    try:
        format = msgspec.json.decode(content, type=_Format).format
        if format > FORMAT:
            return f"{path} has format {format}, of a newer version; this one reads up to {FORMAT}"
        return msgspec.json.decode(content, type=FolderManifest)
    except UNREADABLE as error:
        return f"{path} is damaged: {error}"


def digest(path: Path) -> str:
    """The digest of a file's content."""
    with path.open("rb") as file:
        return file_digest(file, lambda: blake2b(digest_size=16)).hexdigest()
