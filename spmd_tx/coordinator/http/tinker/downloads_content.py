"""The content of a download: a file of a checkpoint or a tar archive of all, or a byte range of it."""

import asyncio
import re
import tarfile
from collections.abc import AsyncIterator, Callable, Mapping
from typing import NamedTuple

from spmd_tx.coordinator.checkpoints.files import Manifest

RANGE = re.compile(r"bytes=\s*(\d{0,19})-(\d{0,19})\s*", re.IGNORECASE)
PIECE_BYTES = 1 << 20  # read and sent at a time
COMPLETE = "checkpoint_complete"  # an empty file that SDKs up to 0.35 expect in an archive

ReadFile = Callable[[str, int, int], bytes]  # name, start, size; blocks


class ByteRange(NamedTuple):
    """Holds a byte range; ``end`` is exclusive."""

    start: int
    end: int


class ContentPart(NamedTuple):
    """Holds bytes in memory, or names a file."""

    size: int
    content: bytes = b""
    name: str | None = None


def is_known(headers: Mapping[str, str], etag: str) -> bool:
    """Return whether the client has this content already (If-None-Match)."""
    etags = [each.strip().removeprefix("W/") for each in headers.get("if-none-match", "").split(",")]
    return etag in etags or "*" in etags


def requested_range(headers: Mapping[str, str], etag: str, size: int) -> ByteRange | None:
    """Return the byte range that a client asks for, empty if it lies behind the end; None for everything.

    A client also gets everything if it has a part of another version (If-Range), or asks for several ranges,
    which a server may ignore.
    """
    match = RANGE.fullmatch(headers.get("range", ""))
    if match is None or headers.get("if-range", etag) != etag:
        return None
    first, last = match.groups()
    if not first and not last:
        return None
    if not first:
        return ByteRange(max(0, size - int(last)), size)
    if last and int(last) < int(first):
        return None  # not a range
    start = int(first)
    return ByteRange(start, max(start, min(int(last) + 1, size) if last else size))


def of_file(manifest: Manifest, name: str) -> list[ContentPart]:
    return [ContentPart(manifest.files[name], name=name)]


def of_archive(manifest: Manifest) -> list[ContentPart]:
    """Lay out an uncompressed tar archive; all offsets follow from the files' sizes."""
    parts = []
    for name, size in [*sorted(manifest.files.items()), (COMPLETE, 0)]:
        entry = tarfile.TarInfo(name)
        entry.size, entry.mtime = size, int(manifest.created_at)
        header = entry.tobuf(tarfile.PAX_FORMAT)
        padding = bytes(-size % tarfile.BLOCKSIZE)
        parts += [
            ContentPart(len(header), header),
            ContentPart(size, name=name),
            ContentPart(len(padding), padding),
        ]
    end = bytes(2 * tarfile.BLOCKSIZE)
    return [*parts, ContentPart(len(end), end)]


def size_of(parts: list[ContentPart]) -> int:
    return sum(part.size for part in parts)


async def pieces(parts: list[ContentPart], span: ByteRange, read: ReadFile) -> AsyncIterator[bytes]:
    """Yield the bytes of a span in pieces."""
    offset = 0
    for part in parts:
        start, end = max(span.start - offset, 0), min(span.end - offset, part.size)
        offset += part.size
        if part.name is None and start < end:
            yield part.content[start:end]
        elif part.name is not None:
            for at in range(start, end, PIECE_BYTES):
                yield await asyncio.to_thread(read, part.name, at, min(PIECE_BYTES, end - at))
