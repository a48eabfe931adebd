"""Reads and writes one adapter as a PEFT folder, as Hugging Face peft and many servers load it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
from safetensors import SafetensorError, safe_open

from spmd_tx.durable_files import new_folder, sync
from spmd_tx.errors import DamagedWeights, ForeignWeights, MeshError
from spmd_tx.models.adapter_formats.files import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    AdapterModule,
    config_of,
    is_as_written,
    modules,
    spelling,
    stored_names,
    write_tensors,
)
from spmd_tx.models.adapters.lora import Adapters, Lora, for_maps, shapes
from spmd_tx.models.declared.model import HEAD, Model
from spmd_tx.protocol.commands import AdapterSpec

BUFFER_BYTES = 1 << 20


def write(
    path: Path, adapters: Adapters[np.ndarray], adapter: AdapterSpec, model: Model, base_model: str
) -> None:
    """Write the folder durably and atomically, replacing an earlier one of that name.

    Shapes are A [L, R, in] and B [L, R, out], the head's without L, experts' own [L, X, ...]; rows beyond the
    adapter's rank are padding.
    """
    tensors: dict[str, np.ndarray] = {}
    for module in modules(adapter, model):
        factors = _views(adapters, module)
        tensors[module.name_a] = factors.a
        tensors[module.name_b] = factors.b.swapaxes(-1, -2)
    in_file = {name: tensor.shape for name, tensor in tensors.items()}
    _write_folder(
        path,
        {
            WEIGHTS_FILE: lambda file: write_tensors(file, in_file, tensors.__getitem__),
            CONFIG_FILE: lambda file: file.write(config_of(adapter, model, base_model)),
        },
    )


def is_folder(path: Path) -> bool:
    """Say whether there is a complete PEFT folder."""
    return (path / CONFIG_FILE).exists()


def read(path: Path, adapter: AdapterSpec, model: Model, rank: int) -> Adapters[np.ndarray]:
    """Return the adapter in fp32, padded with zeros to ``rank``; untrained groups are zero.

    Raises ForeignWeights when the file has other factors than such an adapter, DamagedWeights when they are
    not those that were written, or not finite, and MeshError when this host cannot read the file.
    """
    adapters = _zeros(model, rank)
    file = path / WEIGHTS_FILE
    try:
        with safe_open(file, framework="np") as tensors:
            if not is_as_written(file, tensors.metadata()):
                raise DamagedWeights(f"{file} is damaged: its weights do not have their checksum")
            stored = stored_names(tensors.keys())
            _check_names(file, set(stored), adapter, model)
            for module in modules(adapter, model):
                factors = _views(adapters, module)
                for name, shape, factor in (
                    (module.name_a, module.a, factors.a),
                    (module.name_b, module.b, factors.b.swapaxes(-1, -2)),
                ):
                    tensor = tensors.get_tensor(stored[spelling(name)])
                    _check(file, name, tensor, shape)
                    factor[...] = tensor
    except SafetensorError as problem:
        raise DamagedWeights(f"{file} is damaged: {problem}") from problem
    except OSError as problem:
        raise MeshError(f"cannot read {file}: {problem}") from problem
    return adapters


def _views(adapters: Adapters[np.ndarray], module: AdapterModule) -> Lora[np.ndarray]:
    """Return views of a module's factors up to its rank: [..., R, in] and [..., R, out]."""
    pair = adapters.head if module.map == HEAD else adapters.layers[module.map]
    rank = module.a[-2]
    views = (factor[module.at][..., :rank, :] for factor in (pair.a, pair.b))
    # A file keeps the dimension of experts where they share a factor.
    return Lora(*(view[None] if view.ndim < len(module.a) else view for view in views))


def _zeros(model: Model, rank: int) -> Adapters[np.ndarray]:
    def pair(name: str) -> Lora[np.ndarray]:
        factor_shapes = shapes(model, name, rank)
        return Lora(np.zeros(factor_shapes.a, np.float32), np.zeros(factor_shapes.b, np.float32))

    return for_maps(model, pair)


def _check(file: Path, name: str, factor: np.ndarray, expected: tuple[int, ...]) -> None:
    if factor.shape != expected:
        raise ForeignWeights(
            f"{file}: {name} has the shape {list(factor.shape)}; in this base model it is {list(expected)}"
        )
    if not np.isfinite(factor).all():
        raise DamagedWeights(f"{file} is damaged: {name} is not finite")


def _check_names(file: Path, stored: set[str], adapter: AdapterSpec, model: Model) -> None:
    factors = ((module.name_a, module.name_b) for module in modules(adapter, model))
    expected = {spelling(name) for pair in factors for name in pair}
    for missing in sorted(expected - stored):
        raise ForeignWeights(f"{file}: there is no {missing}, which an adapter of this base model has")
    for other in sorted(stored - expected):
        raise ForeignWeights(f"{file}: an adapter of this base model has no {other}")


def _write_folder(path: Path, writers: dict[str, Callable[[BinaryIO], object]]) -> None:
    """Write under a temporary name beside the path, then rename."""
    with new_folder(path) as folder:
        for name, write_content in writers.items():
            with open(folder / name, "wb", buffering=BUFFER_BYTES) as file:
                write_content(file)
                file.flush()
                os.fsync(file.fileno())
        sync(folder)
