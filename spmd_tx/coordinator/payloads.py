"""Bodies of requests and results on disk: many to a file, each a zstd frame, durable when written."""

import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import zstandard

from spmd_tx.coordinator import server_lock
from spmd_tx.coordinator.folder_manifest import sync
from spmd_tx.errors import DamagedBody, StartError

T = TypeVar("T")

_LEVEL = 1  # token ids and floats hardly compress better for more work


class Place(NamedTuple):
    """Where a body is."""

    file: int
    offset: int
    length: int


class PayloadFiles:
    """A directory of numbered files that are written once. All methods block: call them in a thread."""

    def __init__(self, directory: Path) -> None:
        """Take the directory for this process alone. Raises StartError when another one has it."""
        self._directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = server_lock.take(directory / "lock", f"the folder {directory}", "--data-dir")
            for unfinished in directory.glob("*.tmp"):
                unfinished.unlink()
        except OSError as error:
            raise StartError(
                f"cannot write to {directory}: {error.strerror}; make it writable for user {os.getuid()}, "
                "or choose another --data-dir"
            ) from error
        self._next = max(self.numbers(), default=-1) + 1

    def close(self) -> None:
        self._lock.close()

    def numbers(self) -> list[int]:
        return sorted(int(path.stem) for path in self._directory.glob("*.zst"))

    def write(self, bodies: Sequence[bytes]) -> list[Place]:
        """Write a group of bodies as one new file."""
        number, self._next = self._next, self._next + 1
        compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
        frames = [compressor.compress(body) for body in bodies]
        path = self._path(number)
        unfinished = path.with_suffix(".tmp")
        try:
            with unfinished.open("wb") as file:
                file.writelines(frames)
                file.flush()
                os.fsync(file.fileno())
            unfinished.rename(path)
        except OSError:
            unfinished.unlink(missing_ok=True)  # a full disk needs the room
            raise
        sync(self._directory)
        return list(_places(number, frames))

    def read(self, place: Place) -> bytes:
        """Raises DamagedBody when it is not there as it was written; an OSError may go away."""
        path = self._path(place.file)
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

    def delete(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._path(number).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:012d}.zst"


class Recent(Generic[T]):
    """The values used last, up to a number of bytes in all."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity  # bytes
        self._size = 0
        self._values: OrderedDict[str, tuple[T, int]] = OrderedDict()

    def put(self, key: str, value: T, size: int) -> None:
        if key in self._values or size > self._capacity:
            return
        self._values[key] = value, size
        self._size += size
        while self._size > self._capacity:
            _, (_, freed) = self._values.popitem(last=False)
            self._size -= freed

    def drop(self, key: str) -> None:
        """Make room; nothing happens for one that is not there."""
        if key in self._values:
            self._size -= self._values.pop(key)[1]

    def get(self, key: str) -> T | None:
        if key not in self._values:
            return None
        self._values.move_to_end(key)
        return self._values[key][0]


def _places(number: int, frames: Sequence[bytes]) -> Iterable[Place]:
    offset = 0
    for frame in frames:
        yield Place(number, offset, len(frame))
        offset += len(frame)
