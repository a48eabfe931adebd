"""Bodies of requests and results on disk: many to a file, each a zstd frame, durable when written."""

import fcntl
import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Generic, NamedTuple, TypeVar

import zstandard

from spmd_tx.errors import StartError

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
            self._lock = _lock(directory / "lock")
        except OSError as error:
            raise StartError(
                f"cannot write to {directory}: {error.strerror}; choose another --data-dir"
            ) from error
        for unfinished in directory.glob("*.tmp"):
            unfinished.unlink()
        self._next = max(self.numbers(), default=-1) + 1

    def close(self) -> None:
        self._lock.close()

    def numbers(self) -> list[int]:
        return sorted(int(path.stem) for path in self._directory.glob("*.zst"))

    def write(self, bodies: Sequence[bytes]) -> list[Place]:
        """Write a group of bodies as one new file."""
        number, self._next = self._next, self._next + 1
        compressor = zstandard.ZstdCompressor(level=_LEVEL)
        frames = [compressor.compress(body) for body in bodies]
        path = self._path(number)
        unfinished = path.with_suffix(".tmp")
        with unfinished.open("wb") as file:
            file.writelines(frames)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
        _sync_directory(self._directory)
        return list(_places(number, frames))

    def read(self, place: Place) -> bytes:
        with self._path(place.file).open("rb") as file:
            file.seek(place.offset)
            return zstandard.ZstdDecompressor().decompress(file.read(place.length))

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


def _lock(path: Path) -> IO[str]:
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise StartError(
            f"{path.parent} is in use by another running server; stop it, or choose another --data-dir"
        ) from None
    return file


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
