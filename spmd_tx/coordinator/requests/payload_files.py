"""Stores the bodies of requests and results, many to a file, each a zstd frame, durable when written.

Small bodies are left to the rows of the database: they are durable with the commit, without a sync of their
own. Groups are appended to one file until it is full or old. A process only appends to files that it has
begun itself, so whatever a crash leaves at the end of a file stays there, and nothing refers to it.
"""

import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

import zstandard

from spmd_tx.coordinator.requests.records import BodyPlace, BodyRef
from spmd_tx.coordinator.storage import lock_file
from spmd_tx.durable_files import make_folder, sync
from spmd_tx.errors import DamagedBody, StartError

_LEVEL = 1  # of compression; token IDs and floats hardly compress better at higher levels

SEGMENT_BYTES = 32 << 20  # a file is deleted when nothing in it is needed, so it should not hold too much
SEGMENT_SECONDS = 600.0
PIECE_BYTES = 1 << 20  # written at once
SMALL_BYTES = 1 << 10  # up to which a body goes into a row: a few tokens, or options


@dataclass
class _Segment:
    """Appends bodies to one file."""

    number: int
    file: FileIO
    size: int = 0  # bytes that are durable
    began_at: float = field(default_factory=time.monotonic)

    @property
    def is_full(self) -> bool:
        return self.size >= SEGMENT_BYTES or time.monotonic() - self.began_at > SEGMENT_SECONDS

    def append(self, bodies: Sequence[bytes]) -> list[BodyPlace]:
        """Append bodies, compressed piece by piece to save memory. When it fails, the file is as before."""
        compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
        places, end, pending = list[BodyPlace](), self.size, bytearray()
        try:
            for body in bodies:
                frame = compressor.compress(body)
                places.append(BodyPlace(self.number, end, len(frame)))
                end += len(frame)
                pending += frame
                if len(pending) > PIECE_BYTES:
                    self._put(pending)
                    pending.clear()
            self._put(pending)
            os.fdatasync(self.file.fileno())
        except OSError:
            self.file.truncate(self.size)
            raise
        self.size = end
        return places

    def _put(self, content: bytes | bytearray) -> None:
        at = 0
        while at < len(content):
            at += self.file.write(bytes(content[at:]) if at else content)


class PayloadFiles:
    """Manages a directory of numbered files that only grow. All methods block: call them in a thread."""

    def __init__(self, directory: Path) -> None:
        """Lock the directory for this process. Raises StartError when another process has locked it."""
        self._directory = directory
        try:
            make_folder(directory)
            self._lock = lock_file.lock(directory / "lock", f"the folder {directory}", "--data-dir")
            for unfinished in directory.glob("*.tmp"):
                unfinished.unlink()
        except OSError as error:
            raise StartError(
                f"cannot write to {directory}: {error.strerror}; make it writable for user {os.getuid()}, "
                "or choose another --data-dir"
            ) from error
        self._next = max(self.numbers(), default=-1) + 1
        self._segment: _Segment | None = None

    def close(self) -> None:
        self._end()
        self._lock.close()

    def numbers(self) -> list[int]:
        return sorted(int(path.stem) for path in self._directory.glob("*.zst"))

    @property
    def open_numbers(self) -> set[int]:
        """The file that the next group may be appended to."""
        return set() if self._segment is None else {self._segment.number}

    def write(self, bodies: Sequence[bytes]) -> list[BodyRef]:
        """Write the large bodies of a group, all or none. The result is a reference to each body."""
        large = [body for body in bodies if len(body) > SMALL_BYTES]
        places = iter(self._append(large) if large else [])
        return [next(places) if len(body) > SMALL_BYTES else body for body in bodies]

    def _append(self, bodies: Sequence[bytes]) -> list[BodyPlace]:
        segment = self._segment
        if segment is None or segment.is_full:
            segment = self._begin()
        try:
            return segment.append(bodies)
        except OSError:
            self._end()
            raise

    def _begin(self) -> _Segment:
        """Begin a new file."""
        self._end()
        file = _path(self._directory, self._next).open("xb", buffering=0)
        self._segment = segment = _Segment(self._next, file)
        self._next += 1
        try:
            sync(self._directory)
        except OSError:
            self._end()
            raise
        return segment

    def _end(self) -> None:
        """Close the file, if there is one; an empty one is deleted, since the disk may be full."""
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.file.close()
            if not segment.size:
                self.delete([segment.number])

    def read(self, place: BodyRef) -> bytes:
        """Read a body. Raises DamagedBody when it is missing or damaged; an OSError may pass."""
        return read_body(self._directory, place)

    def delete(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            _path(self._directory, number).unlink(missing_ok=True)


def read_body(directory: Path, place: BodyRef) -> bytes:
    """As ``PayloadFiles.read``, but also beside the process that has locked the directory."""
    if isinstance(place, bytes):
        return place
    path = _path(directory, place.file)
    try:
        with path.open("rb") as file:
            file.seek(place.offset)
            frame = file.read(place.length)
    except FileNotFoundError:
        raise DamagedBody(f"{path} is missing") from None
    if len(frame) != place.length:
        raise DamagedBody(
            f"{path} is truncated: from byte {place.offset} on it has {len(frame)} of {place.length}"
        )
    try:
        return zstandard.ZstdDecompressor().decompress(frame)
    except zstandard.ZstdError as error:
        raise DamagedBody(
            f"{path} is damaged in the {place.length} bytes from byte {place.offset} on: {error}"
        ) from error


def _path(directory: Path, number: int) -> Path:
    return directory / f"{number:012d}.zst"
