"""Writes adapters, or whole models, as folders in a thread of its own, while commands run."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import SingleDeviceSharding

from spmd_tx.protocol.commands import AdapterSpec
from spmd_tx.worker.idle_adapters import PINNED
from spmd_tx.worker.storage.checkpoints import OnEnd

Write = Callable[[Path, Any, AdapterSpec], None]  # what is written has arrays in host memory


class FolderWriter:
    """Copies weights to host memory, and writes them one after the other."""

    def __init__(self, write: Write, budget: int, on_end: OnEnd) -> None:
        """Hold at most ``budget`` bytes that are not written yet; the thread calls ``on_end``."""
        self._write_folder = write
        self._budget = budget
        self._on_end = on_end
        self._held = 0  # bytes
        self._has_room = threading.Condition()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="folder-writer")

    def submit(self, path: Path, content: Any, adapter: AdapterSpec) -> None:
        """Begin to write arrays, all of whose values this process can address.

        Returns before they are copied, but not before the budget has room for them.
        """
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(content))
        self.make_room(size)
        self.begin(path, jax.tree.map(HostCopy, content), size, adapter)

    def make_room(self, size: int) -> None:
        """Wait until the budget has room for so many bytes, and take it for the next ``begin``."""
        with self._has_room:
            self._has_room.wait_for(lambda: not self._held or self._held + size <= self._budget)
            self._held += size

    def begin(self, path: Path, copies: Any, size: int, adapter: AdapterSpec) -> None:
        """Begin to write what is on its way to host memory; ``copies`` has a HostCopy of each array."""
        writing = self._thread.submit(self._write, path, copies, adapter)
        writing.add_done_callback(partial(self._end, path, size))

    def _write(self, path: Path, copies: Any, adapter: AdapterSpec) -> None:
        self._write_folder(path, jax.tree.map(HostCopy.whole, copies), adapter)

    def _end(self, path: Path, size: int, writing: "Future[None]") -> None:
        with self._has_room:
            self._held -= size
            self._has_room.notify_all()
        problem = writing.exception()
        self._on_end(str(path), None if problem is None else f"{type(problem).__name__}: {problem}")


class HostCopy:
    """Holds one array's pieces in host memory, or on their way there."""

    def __init__(self, array: Array, *, is_donated: bool = False) -> None:
        """``is_donated``: whether a later step may take the array's memory."""
        self._shape, self._dtype = array.shape, array.dtype
        shards = array.addressable_shards
        wanted = shards[:1] if array.is_fully_replicated else [s for s in shards if s.replica_id == 0]
        self._pieces = [(shard.index, _to_host(shard.data, shard.device, is_donated)) for shard in wanted]

    def whole(self) -> np.ndarray:
        """Wait for the copy, and put the pieces together."""
        if len(self._pieces) == 1:
            return np.asarray(self._pieces[0][1])
        whole = np.empty(self._shape, self._dtype)
        for index, piece in self._pieces:
            whole[index] = np.asarray(piece)
        return whole


def _to_host(piece: Array, device: Any, is_donated: bool) -> Array | np.ndarray:
    if device.platform == "cpu":
        return np.array(piece) if is_donated else piece
    return jax.device_put(piece, SingleDeviceSharding(device, memory_kind=PINNED))
