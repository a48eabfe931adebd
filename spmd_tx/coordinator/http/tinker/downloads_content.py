"""The bytes of a download, any part of them: one file of a checkpoint, or all as a tar archive."""

import asyncio
import re
import tarfile
from collections.abc import AsyncIterator, Callable, Mapping
from typing import NamedTuple

from spmd_tx.coordinator.checkpoints.files import Manifest

RANGE = re.compile(r"bytes=\s*(\d{0,19})-(\d{0,19})\s*", re.IGNORECASE)


class Span(NamedTuple):
    """Bytes from ``start`` up to, but not with, ``end``."""

    start: int
    end: int


def is_known(headers: Mapping[str, str], etag: str) -> bool:
    """Whether the client has it already."""
    known = [each.strip().removeprefix("W/") for each in headers.get("if-none-match", "").split(",")]
    return etag in known or "*" in known


def wanted(headers: Mapping[str, str], etag: str, size: int) -> Span | None:
    """The one range that a client asks for; None for all. An empty one if there are no such bytes.

    All is also for those who have a part of another version (If-Range), and for several ranges: a server
    may ignore them.
    """
    found = RANGE.fullmatch(headers.get("range", ""))
    if found is None or headers.get("if-range", etag) != etag:
        return None
    first, last = found.groups()
    if not first and not last:
        return None
    if not first:
        return Span(max(0, size - int(last)), size)
    if last and int(last) < int(first):
        return None  # not a range at all
    start = int(first)
    return Span(start, max(start, min(int(last) + 1, size) if last else size))


PIECE_BYTES = 1 << 20  # read and sent at a time
COMPLETE = "checkpoint_complete"  # an empty file, for which SDKs up to 0.35 look in an archive

ReadFile = Callable[[str, int, int], bytes]  # name, start, size; blocks


class Part(NamedTuple):
    """Bytes in memory, or the name of a file."""

    size: int
    content: bytes = b""
    name: str | None = None


def of_file(manifest: Manifest, name: str) -> list[Part]:
    return [Part(manifest.files[name], name=name)]


def of_archive(manifest: Manifest) -> list[Part]:
    """An uncompressed tar archive: where everything is in it follows from the sizes."""
    parts = []
    for name, size in [*sorted(manifest.files.items()), (COMPLETE, 0)]:
        entry = tarfile.TarInfo(name)
        entry.size, entry.mtime = size, int(manifest.created_at)
        header = entry.tobuf(tarfile.PAX_FORMAT)
        padding = bytes(-size % tarfile.BLOCKSIZE)
        parts += [Part(len(header), header), Part(size, name=name), Part(len(padding), padding)]
    end = bytes(2 * tarfile.BLOCKSIZE)
    return [*parts, Part(len(end), end)]


def size_of(parts: list[Part]) -> int:
    return sum(part.size for part in parts)


async def pieces(parts: list[Part], span: Span, read: ReadFile) -> AsyncIterator[bytes]:
    """The bytes of a span, a piece after the other."""
    offset = 0
    for part in parts:
        start, end = max(span.start - offset, 0), min(span.end - offset, part.size)
        offset += part.size
        if part.name is None and start < end:
            yield part.content[start:end]
        elif part.name is not None:
            for at in range(start, end, PIECE_BYTES):
                yield await asyncio.to_thread(read, part.name, at, min(PIECE_BYTES, end - at))
