"""Folders of random adapters, as a server exports them, made without a server."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from spmd_tx.models.adapter_formats import files as adapter_files
from spmd_tx.models.declared.model import Model
from spmd_tx.protocol.commands import AdapterSpec

Tensors = dict[str, np.ndarray]


def random_tensors(adapter: AdapterSpec, model: Model, seed: int = 0) -> Tensors:
    random = np.random.default_rng(seed)
    return {
        name: 0.1 * random.standard_normal(shape).astype(np.float32)
        for module in adapter_files.modules(adapter, model)
        for name, shape in module.shapes.items()
    }


def write_folder(
    folder: Path,
    adapter: AdapterSpec,
    model: Model,
    base_model: str,
    change: Callable[[Tensors], object] = lambda tensors: None,
) -> Path:
    """Write a complete folder, and return it; ``change`` changes the tensors before."""
    tensors = random_tensors(adapter, model)
    change(tensors)
    folder.mkdir(parents=True, exist_ok=True)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    with open(folder / adapter_files.WEIGHTS_FILE, "wb") as file:
        adapter_files.write_tensors(file, shapes, tensors.__getitem__)
    (folder / adapter_files.CONFIG_FILE).write_bytes(adapter_files.config_of(adapter, model, base_model))
    return folder
