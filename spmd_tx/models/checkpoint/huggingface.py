"""Reads a Hugging Face checkpoint straight into sharded arrays, as the weights are declared.

Every process reads only the slices that its own devices hold, each of them once. Files are mapped into memory
and copied to their place in one pass, in which matrices are transposed block by block: threads do that at the
speed of memory, so it need not be left to the devices.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import add
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding

from spmd_tx.models.checkpoint.encoders import encode_groups
from spmd_tx.models.checkpoint.encodings import decoded_part, piece_of
from spmd_tx.models.checkpoint.files import Files
from spmd_tx.models.checkpoint.tensors import SliceBounds, check, parts, stacked, stored_slices, tensor_name
from spmd_tx.models.declared.unread import Unread
from spmd_tx.sharding.weight import Weight

READERS = 8  # tensors read and transposed at once
BLOCK = 64  # rows of a matrix that are transposed together: in 16 bits, two cache lines of the result
ALIGNMENT = 64  # bytes; CPU devices use such arrays where they are


def load(
    model_dir: Path,
    declared: Any,
    mesh: Mesh,
    progress: Callable[[str], None],
    unread: Unread | None = None,
) -> Any:
    """Return the tree of arrays for a tree of Weights; None stays None.

    ``unread`` says which tensors need not be declared; None: any. Raises StartError
    when the directory is not a checkpoint of the declared model, before anything is read.
    """
    weights = jax.tree.leaves(declared)
    files = Files(model_dir)
    check(files, weights, unread)
    loading = _Loading(files, mesh, progress)
    loading.expect(weights)
    with ThreadPoolExecutor(READERS, thread_name_prefix="load-weights") as pool:
        return jax.tree.map(lambda weight: loading.array(weight, pool), declared)


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> SliceBounds:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _local_bounds(weight: Weight, mesh: Mesh) -> list[SliceBounds]:
    """Return the distinct parts of the weight that this process's devices hold."""
    indices = NamedSharding(mesh, weight.spec).addressable_devices_indices_map(weight.shape).values()
    return sorted({_bounds(index, weight.shape) for index in indices if index is not None})


def _size(bounds: SliceBounds) -> int:
    return math.prod(stop - start for start, stop in bounds)


@dataclass
class _Loading:
    """Reads one weight after the other and reports progress."""

    files: Files
    mesh: Mesh
    progress: Callable[[str], None]
    total: int = 0  # elements
    done: int = 0
    percent: int = -1  # as last reported

    def expect(self, weights: list[Weight]) -> None:
        self.total = sum(_size(bounds) for weight in weights for bounds in _local_bounds(weight, self.mesh))
        self._count(0)

    def array(self, weight: Weight, pool: ThreadPoolExecutor) -> Array:
        parts = {bounds: self._read(weight, bounds, pool) for bounds in _local_bounds(weight, self.mesh)}
        sharding = NamedSharding(self.mesh, weight.spec)
        return jax.make_array_from_callback(
            weight.shape, sharding, lambda index: parts[_bounds(index or (), weight.shape)]
        )

    def _read(self, weight: Weight, bounds: SliceBounds, pool: ThreadPoolExecutor) -> np.ndarray:
        """Read one part of a weight in the declared dtype."""
        part = _empty([stop - start for start, stop in bounds], weight.dtype)
        lead = len(stacked(weight))
        slices = stored_slices(weight, bounds[lead:])

        def read(index: tuple[int, ...]) -> int:
            first = (start for start, _ in bounds[:lead])
            name, place = tensor_name(weight, tuple(map(add, first, index))), part[index]
            for expert, stored in self._stored(weight, name, slices):
                if weight.transposed:
                    _transpose(stored, place[expert])
                else:
                    place[expert] = stored
            return place.size

        for size in pool.map(read, np.ndindex(part.shape[:lead])):
            self._count(size)
        return part

    def _stored(
        self, weight: Weight, name: str, slices: tuple[slice, ...]
    ) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        """Yield what is wanted of a tensor; an encoded one matrix after matrix, each with its index in it."""
        tensors = [self.files.tensor(part.name) for part in parts(weight, name)]
        if weight.encoding is None:
            stored = tensors[0][slices]
            if weight.piece:
                yield from _encoded(weight, stored)
            else:
                yield from (((), stored),) if not weight.transposed else _matrices(stored)
            return
        numbers, scales = (tensor[slices[:-2]] for tensor in tensors)
        for expert in np.ndindex(numbers.shape[: len(slices) - 2]):
            matrix = weight.encoding, numbers[expert], scales[expert], *slices[-2:]
            if weight.piece and weight.kept == weight.encoding:
                yield expert, piece_of(weight.piece, *matrix)
            elif weight.piece:
                yield expert, _piece(weight, decoded_part(*matrix))
            else:
                yield expert, decoded_part(*matrix)

    def _count(self, size: int) -> None:
        self.done += size
        percent = 10 * (10 * self.done // max(self.total, 1))
        if percent != self.percent:
            self.percent = percent
            self.progress(f"loading weights {percent} %")


def _matrices(stored: np.ndarray) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    return ((index, stored[index]) for index in np.ndindex(stored.shape[:-2]))


def _encoded(weight: Weight, stored: np.ndarray) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """Encode matrices that are stored as floating-point numbers; yield the weight's piece of each."""
    for index, matrix in _matrices(stored):
        piece = _piece(weight, matrix if weight.transposed else matrix.T)
        yield index, piece if weight.transposed else piece.T


def _piece(weight: Weight, matrix_OI: np.ndarray) -> np.ndarray:
    """Encode a matrix as devices keep it, and return the weight's part of that."""
    return encode_groups(weight.kept, matrix_OI.astype(np.float32))[weight.piece == "scales"]


def _empty(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Return memory that begins where a cache line does."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def _transpose(stored: np.ndarray, place: np.ndarray) -> None:
    """Copy a transposed matrix to its place, in the dtype of the place.

    In blocks: whole rows of the one are so far apart in the other that each item would cost a cache line.
    """
    if stored.dtype == place.dtype and stored.dtype.itemsize == 2:
        stored, place = stored.view(np.uint16), place.view(np.uint16)  # which NumPy copies faster
    for start in range(0, len(stored), BLOCK):
        rows = stored[start : start + BLOCK]
        if rows.dtype != place.dtype:
            rows = rows.astype(place.dtype)
        place[:, start : start + BLOCK] = rows.T
