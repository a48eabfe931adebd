"""Writes a model all of whose weights were trained, as a complete Hugging Face checkpoint."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

from spmd_tx.durable_files import new_folder, sync_tree
from spmd_tx.exports.checkpoint import write_checkpoint
from spmd_tx.exports.tensors import NAMES, Tensor
from spmd_tx.models.base_weights import Weights
from spmd_tx.models.checkpoint.files import DTYPES, Files
from spmd_tx.models.config import ModelConfig
from spmd_tx.models.declared.layers import LM_HEAD
from spmd_tx.sharding.weight import Weight


def write_model(
    path: Path, w: Weights[np.ndarray], declared: Weights[Weight], model: ModelConfig, model_dir: Path
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

    def __init__(
        self, files: Files, w: Weights[np.ndarray], declared: Weights[Weight], model: ModelConfig
    ) -> None:
        self.dtype: str | None = str(np.dtype(declared.embed.dtype))
        self._files = files
        self._parts: dict[str, list[tuple[Weight, np.ndarray, int | None]]] = defaultdict(list)
        for weight, array in zip(jax.tree.leaves(declared), jax.tree.leaves(w), strict=True):
            if weight.numbers is None:
                self._parts[weight.hf_name].append((weight, array, None))
            for index, number in enumerate(weight.numbers or ()):
                self._parts[weight.hf_name.format(layer=number)].append((weight, array, index))
        if model.declared.head is None:
            self._parts[LM_HEAD.name] = self._parts[model.declared.embed.name]

    def made_of(self, names: Iterable[str]) -> list[Tensor]:
        """Return the tensors of some names."""
        return [self._of(name) for name in names]

    def _of(self, name: str) -> Tensor:
        stored = self._files.tensor(name)
        dtype = self._parts[name][0][0].dtype if name in self._parts else stored.dtype
        return Tensor(name, NAMES[np.dtype(dtype)], stored.shape, name)

    def content(self, tensor: Tensor) -> Iterator[np.ndarray]:
        """Yield the whole tensor; one that no array was read from, as the base model has it."""
        dtype = DTYPES[tensor.dtype]
        if tensor.name not in self._parts:
            yield self._files.tensor(tensor.name).astype(dtype, copy=False)
            return
        whole = np.empty(tensor.shape, dtype)
        for weight, array, index in self._parts[tensor.name]:
            numbers = array if index is None else array[index]
            rows = slice(None) if weight.rows is None else slice(*weight.rows)
            part = whole[rows]
            limit = float(ml_dtypes.finfo(dtype).max)  # as steps/full.py rounds what samplers have
            kept = numbers if numbers.dtype == dtype else np.clip(numbers, -limit, limit)
            part[...] = (kept.T if weight.transposed else kept).reshape(part.shape).astype(dtype)
        yield whole
