"""This process's shards of adapters that are not on the device: in host memory, and beyond a limit in files.

These are models without a training slot, and versions without a slot in the sampler bank.

Files are written in the background, least recently used adapters first. They are of no use to other
processes or later ones: a lost generation is restored from snapshots and the log.
"""

import logging
import shutil
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Sharding, SingleDeviceSharding

logger = logging.getLogger(__name__)

PINNED = "pinned_host"  # memory that a device reads and writes without the CPU
MOST_WRITING = 4  # adapters being written to disk, which are still in host memory


@dataclass(eq=False)
class _Idle:
    """Holds one array: the pieces of this process's devices, in memory, in a file, or in both."""

    shape: tuple[int, ...]
    sharding: Sharding
    devices: list[Any]
    dtype: np.dtype
    lengths: list[int]  # of each piece
    pieces: list[Array] | None
    path: Path
    writing: Future[None] | None = None

    @property
    def size(self) -> int:
        return self.dtype.itemsize * sum(self.lengths)  # bytes


def place_of(directory: Path, generation: int, process: int) -> Path:
    """Return the folder of a process's vectors, and delete those of earlier generations.

    A worker of an earlier generation that still lives loses its files, and cannot overwrite this one's.
    """
    for folder in directory.glob("generation-*"):
        if int(folder.name.rpartition("-")[2]) < generation:
            shutil.rmtree(folder, ignore_errors=True)
    return directory / f"generation-{generation}" / f"process-{process}"


class IdleAdapters:
    """Keeps trees of arrays by name: vectors of bits (steps/swap.py), or a whole model. For one thread."""

    def __init__(self, directory: Path, budget: int) -> None:
        """Empty ``directory``, now and at the end; at most ``budget`` bytes stay in host memory."""
        shutil.rmtree(directory, ignore_errors=True)
        self._directory = directory
        self._budget = budget
        self._trees: dict[str, Any] = {}  # by name: the structure
        self._idle: OrderedDict[tuple[str, int], _Idle] = OrderedDict()  # least recently used first
        self._numbers = count()
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="idle-adapters")
        self._disk_has_failed = False
        weakref.finalize(self, shutil.rmtree, directory, ignore_errors=True)

    @property
    def host_bytes(self) -> int:
        return sum(idle.size for idle in self._idle.values() if idle.pieces is not None)

    @property
    def disk_bytes(self) -> int:
        return sum(idle.size for idle in self._idle.values() if idle.pieces is None)

    def put(self, name: str, tree: Any) -> None:
        """Move arrays off the devices. Returns before the copy is complete."""
        leaves, self._trees[name] = jax.tree.flatten(tree)
        for number, leaf in enumerate(leaves):
            self._put((name, number), leaf)

    def take(self, name: str) -> tuple[Any, bool]:
        """Put arrays back on their devices; return them, and whether any was read from disk."""
        idle = self._pop(name)
        is_from_disk = any(each.pieces is None for each in idle)
        return jax.tree.unflatten(self._trees.pop(name), map(self._back, idle)), is_from_disk

    def drop(self, names: Iterable[str]) -> None:
        """Delete what has these names."""
        for name in names:
            for idle in self._pop(name):
                self._delete(idle)
            del self._trees[name]

    def _pop(self, name: str) -> list[_Idle]:
        return [self._idle.pop((name, number)) for number in range(self._trees[name].num_leaves)]

    def _put(self, key: tuple[str, int], array: Array) -> None:
        shards = array.addressable_shards
        devices = [shard.device for shard in shards]
        pieces = [
            jax.device_put(shard.data, SingleDeviceSharding(shard.device, memory_kind=PINNED))
            for shard in shards
        ]
        path = self._directory / f"{next(self._numbers)}.bits"
        dtype, lengths = np.dtype(array.dtype), [piece.size for piece in pieces]
        self._idle[key] = _Idle(array.shape, array.sharding, devices, dtype, lengths, pieces, path)
        self._make_room()

    def _back(self, idle: _Idle) -> Array:
        pieces = _read(idle) if idle.pieces is None else idle.pieces
        back = [
            jax.device_put(piece, SingleDeviceSharding(device, memory_kind=device.default_memory().kind))
            for piece, device in zip(pieces, idle.devices, strict=True)
        ]
        self._delete(idle)
        return jax.make_array_from_single_device_arrays(idle.shape, idle.sharding, back)

    def settle(self) -> None:
        """Wait until everything that is being written is on disk."""
        for idle in self._idle.values():
            if idle.writing is not None:
                self._end_writing(idle)
        self._writer.submit(lambda: None).result()

    def _make_room(self) -> None:
        """Write the least recently used to disk until the rest fits."""
        writing = [(idle, idle.writing) for idle in self._idle.values() if idle.writing is not None]
        for place, (idle, written) in enumerate(writing):
            if written.done() or place <= len(writing) - MOST_WRITING:
                self._end_writing(idle)
        kept = [idle for idle in self._idle.values() if idle.pieces is not None and idle.writing is None]
        excess = sum(idle.size for idle in kept) - self._budget
        for idle in kept:
            if excess <= 0 or self._disk_has_failed:
                return
            idle.writing = self._writer.submit(_write, idle.path, idle.pieces or [])
            excess -= idle.size

    def _end_writing(self, idle: _Idle) -> None:
        assert idle.writing is not None
        writing, idle.writing = idle.writing, None
        problem = writing.exception()  # waits for it
        if problem is None:
            idle.pieces = None
        elif isinstance(problem, OSError):
            self._disk_has_failed = True
            logger.warning("idle adapters stay in host memory, they cannot be written: %s", problem)
        else:
            raise problem

    def _delete(self, idle: _Idle) -> None:
        if idle.pieces is None or idle.writing is not None:
            self._writer.submit(idle.path.unlink, missing_ok=True)


def _write(path: Path, pieces: list[Array]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for piece in pieces:
            file.write(np.asarray(piece).reshape(-1).view(np.uint8).data)


def _read(idle: _Idle) -> list[np.ndarray]:
    content = np.fromfile(idle.path, idle.dtype)
    pieces = np.split(content, np.cumsum(idle.lengths)[:-1])
    return [piece.reshape(idle.sharding.shard_shape(idle.shape)) for piece in pieces]
