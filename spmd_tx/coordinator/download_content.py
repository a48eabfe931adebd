"""The bytes of a download, any part of them: one file of a checkpoint, or all as a tar archive."""

import asyncio
import tarfile
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from spmd_tx.coordinator.byte_ranges import Span
from spmd_tx.coordinator.checkpoints.files import Manifest

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
