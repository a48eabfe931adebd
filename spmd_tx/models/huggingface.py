"""Reads a Hugging Face checkpoint straight into sharded arrays, as the weights are declared.

Every process reads only the slices that its own devices hold, each of them once.
"""

import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import add
from pathlib import Path
from typing import Any

import jax
import ml_dtypes  # noqa: F401  NumPy knows bfloat16 once this is imported
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from safetensors import SafetensorError, safe_open

from spmd_tx.errors import StartError
from spmd_tx.sharding.weight import Weight

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
READERS = 8  # tensors read and transposed at once

Bounds = tuple[tuple[int, int], ...]  # from, to along each dimension


def load(model_dir: Path, declared: Any, mesh: Mesh, progress: Callable[[str], None]) -> Any:
    """Return the tree of arrays for a tree of Weights; None stays None.

    Raises StartError when the directory is not a checkpoint of the declared model.
    """
    weights = jax.tree.leaves(declared)
    try:
        files = _Files(model_dir)
        for weight in weights:
            files.check(weight)
        loading = _Loading(files, mesh, progress)
        loading.expect(weights)
        with ThreadPoolExecutor(READERS, thread_name_prefix="load-weights") as pool:
            return jax.tree.map(lambda weight: loading.array(weight, pool), declared)
    except (SafetensorError, OSError) as problem:
        raise StartError(
            f"cannot read the weights in {model_dir}: {problem}; a file may be damaged or only "
            "half downloaded, so download the model again"
        ) from problem


def _lead(weight: Weight) -> tuple[int, ...]:
    """Return the leading dimensions along which the weight stacks tensors of the checkpoint."""
    return weight.shape[: weight.hf_name.count("{")]


def _name(weight: Weight, index: tuple[int, ...]) -> str:
    """Return the checkpoint's name of one tensor of the weight."""
    return weight.hf_name.format(**dict(zip(("layer", "expert"), index, strict=False)))


def _stored_shape(weight: Weight) -> tuple[int, ...]:
    shape = weight.shape[len(_lead(weight)) :]
    return _stored(shape) if weight.transposed else shape


def _stored(of_each_dimension: tuple[Any, ...]) -> tuple[Any, ...]:
    """Swap the last two dimensions, as in a weight that is stored transposed."""
    *lead, last_but_one, last = of_each_dimension
    return (*lead, last, last_but_one)


class _Files:
    """Opens the safetensors files of one checkpoint and finds tensors in them."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._file_of = _find_tensors(model_dir)
        self._open: dict[Path, Any] = {}

    def tensor(self, name: str) -> Any:
        """Return a handle of the tensor; nothing has been read yet."""
        path = self._file_of.get(name)
        if path is None:
            raise StartError(
                f"{self._model_dir} has no tensor {name!r}, which its config.json calls for; "
                "weights and config.json must be of the same model"
            )
        if path not in self._open:
            self._open[path] = safe_open(path, framework="np")
        try:
            return self._open[path].get_slice(name)
        except SafetensorError:
            raise StartError(f"{path} has no tensor {name!r}, although {INDEX_FILE} says so") from None

    def check(self, weight: Weight) -> None:
        """Raise StartError unless the checkpoint has the weight in its declared shape."""
        expected = _stored_shape(weight)
        for name in (_name(weight, index) for index in np.ndindex(_lead(weight))):
            found = tuple(self.tensor(name).get_shape())
            if found != expected:
                raise StartError(
                    f"{self._file_of[name]}: {name} has the shape {list(found)}, but by config.json "
                    f"it must be {list(expected)}; weights and config.json must be of the same model"
                )


def _find_tensors(model_dir: Path) -> dict[str, Path]:
    """Return the file of every tensor."""
    single, index = model_dir / SINGLE_FILE, model_dir / INDEX_FILE
    if index.exists():
        return _read_index(index)
    if single.exists():
        with safe_open(single, framework="np") as opened:
            return dict.fromkeys(opened.keys(), single)
    raise StartError(
        f"{model_dir} holds no weights: expected {SINGLE_FILE}, or {INDEX_FILE} and the files it names; "
        "other formats are not read"
    )


def _read_index(index: Path) -> dict[str, Path]:
    try:
        weight_map = dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as problem:
        raise StartError(f"{index} is no safetensors index: {problem!r}; download it again") from None
    for file in sorted(set(weight_map.values())):
        if not (index.parent / file).exists():
            raise StartError(f"{index.parent / file} does not exist, but {index.name} names it; download it")
    return {name: index.parent / file for name, file in weight_map.items()}


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> Bounds:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def _local_bounds(weight: Weight, mesh: Mesh) -> list[Bounds]:
    """Return the distinct parts of the weight that this process's devices hold."""
    indices = NamedSharding(mesh, weight.spec).addressable_devices_indices_map(weight.shape).values()
    return sorted({_bounds(index, weight.shape) for index in indices if index is not None})


def _size(bounds: Bounds) -> int:
    return math.prod(stop - start for start, stop in bounds)


@dataclass
class _Loading:
    """Reads one weight after the other and reports progress."""

    files: _Files
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

    def _read(self, weight: Weight, bounds: Bounds, pool: ThreadPoolExecutor) -> np.ndarray:
        """Read one part of a weight in the declared dtype."""
        part = np.empty([stop - start for start, stop in bounds], weight.dtype)
        lead = len(_lead(weight))
        wanted = tuple(slice(*bound) for bound in bounds[lead:])

        def read(index: tuple[int, ...]) -> int:
            first = (start for start, _ in bounds[:lead])
            name = _name(weight, tuple(map(add, first, index)))
            stored = self.files.tensor(name)[_stored(wanted) if weight.transposed else wanted]
            part[index] = stored.swapaxes(-1, -2) if weight.transposed else stored
            return stored.size

        for size in pool.map(read, np.ndindex(part.shape[:lead])):
            self._count(size)
        return part

    def _count(self, size: int) -> None:
        self.done += size
        percent = 10 * (10 * self.done // max(self.total, 1))
        if percent != self.percent:
            self.percent = percent
            self.progress(f"loading weights {percent} %")
