"""Writes adapters as PEFT folders in a thread of its own, while commands run."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import SingleDeviceSharding

from spmd_tx.models import peft
from spmd_tx.models.config import ModelConfig
from spmd_tx.models.lora import Adapters
from spmd_tx.protocol.commands import AdapterSpec
from spmd_tx.worker.checkpoints import OnEnd
from spmd_tx.worker.idle_adapters import PINNED


class PeftWriter:
    """Copies adapters to host memory, and writes them one after the other."""

    def __init__(self, model: ModelConfig, base_model: str, budget: int, on_end: OnEnd) -> None:
        """Hold at most ``budget`` bytes that are not written yet; the thread calls ``on_end``."""
        self._write_folder = partial(_write_folder, model, base_model)
        self._budget = budget
        self._on_end = on_end
        self._held = 0  # bytes
        self._has_room = threading.Condition()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="peft-writer")

    def submit(self, path: Path, one: Adapters[Array], adapter: AdapterSpec) -> None:
        """Begin to write fp32 factors, all of whose values this process can address.

        Returns before they are copied, but not before the budget has room for them.
        """
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(one))
        with self._has_room:
            self._has_room.wait_for(lambda: not self._held or self._held + size <= self._budget)
            self._held += size
        copies = jax.tree.map(_HostCopy, one)
        writing = self._thread.submit(self._write_folder, path, copies, adapter)
        writing.add_done_callback(partial(self._end, path, size))

    def _end(self, path: Path, size: int, writing: "Future[None]") -> None:
        with self._has_room:
            self._held -= size
            self._has_room.notify_all()
        problem = writing.exception()
        self._on_end(str(path), None if problem is None else f"{type(problem).__name__}: {problem}")


class _HostCopy:
    """Holds one array's pieces in host memory, or on their way there."""

    def __init__(self, array: Array) -> None:
        self._shape, self._dtype = array.shape, array.dtype
        shards = array.addressable_shards
        wanted = shards[:1] if array.is_fully_replicated else [s for s in shards if s.replica_id == 0]
        self._pieces = [(shard.index, _to_host(shard.data, shard.device)) for shard in wanted]

    def whole(self) -> np.ndarray:
        """Wait for the copy, and put the pieces together."""
        if len(self._pieces) == 1:
            return np.asarray(self._pieces[0][1])
        whole = np.empty(self._shape, self._dtype)
        for index, piece in self._pieces:
            whole[index] = np.asarray(piece)
        return whole


def _to_host(piece: Array, device: Any) -> Array:
    if device.platform == "cpu":
        return piece
    return jax.device_put(piece, SingleDeviceSharding(device, memory_kind=PINNED))


def _write_folder(
    model: ModelConfig, base_model: str, path: Path, copies: Adapters[Any], adapter: AdapterSpec
) -> None:
    peft.write(path, jax.tree.map(_HostCopy.whole, copies), adapter, model, base_model)
