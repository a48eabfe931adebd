"""Writes a model all of whose weights were trained, as a complete Hugging Face checkpoint."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from spmd_tx.durable_files import new_folder, sync_tree
from spmd_tx.exports.checkpoint import write_checkpoint
from spmd_tx.exports.tensors import NAMES, ResultTensor
from spmd_tx.models.base_weights import Weights
from spmd_tx.models.checkpoint.files import DTYPES, Files
from spmd_tx.models.declared.model import Model
from spmd_tx.models.declared.unread import is_head
from spmd_tx.sharding.weight import Weight
from spmd_tx.worker.storage.stored_array import StoredArray

PIECE_BYTES = 64 << 20  # of a table of rows, read and written at once

Numbers = np.ndarray | StoredArray


def write_model(
    path: Path, w: Weights[Numbers], declared: Weights[Weight], model: Model, model_dir: Path
) -> None:
    """Write the folder durably and atomically, replacing an earlier one of that name.

    Files, tensors that are not read, configuration and tokenizer are those of the base in ``model_dir``.
    ``declared`` says how ``w`` lies in them, and the dtype of each tensor.
    """
    files = Files(model_dir)
    with new_folder(path) as folder:
        tensors = TrainedTensors(files, w, declared, model)
        write_checkpoint(folder, files, tensors, lambda done, total: None)
        sync_tree(folder)


class TrainedTensors:
    """Holds the tensors of a checkpoint, in the base's order, with trained numbers."""

    is_encoded = False

    def __init__(self, files: Files, w: Weights[Numbers], declared: Weights[Weight], model: Model) -> None:
        self.dtype: str | None = str(np.dtype(declared.embed.dtype))
        self._files = files
        self._parts: dict[str, list[tuple[Weight, Numbers, int | None]]] = defaultdict(list)
        for weight, array in zip(jax.tree.leaves(declared), jax.tree.leaves(w), strict=True):
            if weight.numbers is None:
                self._parts[weight.hf_name].append((weight, array, None))
            for index, number in enumerate(weight.numbers or ()):
                self._parts[weight.hf_name.format(layer=number)].append((weight, array, index))
        if model.is_tied:
            self._parts |= dict.fromkeys(filter(is_head, files.names), self._parts[model.embed.name])

    def made_of(self, names: Iterable[str]) -> list[ResultTensor]:
        """Return the tensors of some names."""
        return [self._of(name) for name in names]

    def _of(self, name: str) -> ResultTensor:
        stored = self._files.tensor(name)
        dtype = self._parts[name][0][0].dtype if name in self._parts else stored.dtype
        return ResultTensor(name, NAMES[np.dtype(dtype)], stored.shape, name)

    def content(self, tensor: ResultTensor) -> Iterator[np.ndarray]:
        """Yield the tensor, whole or some rows at a time; as the base has it where none was read from it."""
        dtype = DTYPES[tensor.dtype]
        parts = self._parts.get(tensor.name)
        if parts is None:
            yield self._files.tensor(tensor.name).astype(dtype, copy=False)
            return
        weight, array, index = parts[0]
        if index is None and weight.rows is None and not weight.transposed:
            for piece in _pieces(array):
                yield _rounded(piece, dtype)
            return
        whole = np.empty(tensor.shape, dtype)
        for weight, array, index in parts:
            numbers = array[:] if index is None else array[index]
            rows = slice(None) if weight.rows is None else slice(*weight.rows)
            part = whole[rows]
            part[...] = _rounded(numbers.T if weight.transposed else numbers, dtype).reshape(part.shape)
        yield whole


def _pieces(array: Numbers) -> Iterator[np.ndarray]:
    """Yield an array, some indices along its first dimension at a time."""
    row_bytes = math.prod(array.shape[1:]) * array.dtype.itemsize
    size, step = array.shape[0], max(1, PIECE_BYTES // row_bytes)
    for first in range(0, size, step):
        yield array[first : min(first + step, size)]


def _rounded(numbers: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Round as steps/full.py rounds what samplers have."""
    if numbers.dtype == dtype:
        return numbers
    limit = float(ml_dtypes.finfo(dtype).max)
    return np.clip(numbers, -limit, limit).astype(dtype)
