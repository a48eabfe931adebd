"""Reads the weights of a whole model's training checkpoint (Orbax) and writes the model, outside a worker."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from spmd_tx.errors import StartError
from spmd_tx.models.base_weights import Weights, weights
from spmd_tx.models.checkpoint.files import Files
from spmd_tx.models.config import read_model_config
from spmd_tx.sharding.mesh import make_mesh
from spmd_tx.sharding.weight import Weight
from spmd_tx.worker.storage.checkpoints import restore_weights, stored_arrays
from spmd_tx.worker.storage.full_weights import write_model

CPU = "cpu"


def write_model_of_state(state: Path, place: Path, model_dir: Path) -> None:
    """Write the folder ``place`` in the type of the base in ``model_dir``, whose other files it gets.

    Raises StartError when ``state`` is no training checkpoint of this model. One array is in memory at a
    time: a matrix of all layers, in fp32. The others wait in the folder for temporary files.
    """
    jax.config.update("jax_platforms", CPU)  # accelerators may belong to a server
    model, mesh = read_model_config(model_dir), make_mesh(1, 1, 1)
    dtype = Files(model_dir).tensor(model.declared.embed.name).dtype
    declared = weights(model, mesh, dtype)
    with TemporaryDirectory(prefix="spmd-tx-export-") as folder:
        try:
            w = _in_files(state, declared, Path(folder))
        except (ValueError, KeyError, OSError) as problem:
            raise StartError(
                f"{state} is not a training checkpoint of this base model, or is damaged: {problem}"
            ) from problem
        write_model(place, w, declared, model, model_dir)


def _in_files(state: Path, declared: Weights[Weight], folder: Path) -> Weights[np.ndarray]:
    """Copy each array of the state to a file, and map the files into memory."""
    leaves, tree = jax.tree.flatten(declared)
    _check_shapes(state, declared)
    sharding = jax.sharding.SingleDeviceSharding(jax.devices(CPU)[0])
    mapped: list[np.ndarray] = []
    for number, leaf in enumerate(leaves):
        wanted: list[Any] = [ocp.PLACEHOLDER] * len(leaves)
        wanted[number] = jax.ShapeDtypeStruct(leaf.shape, np.float32, sharding=sharding)
        read = restore_weights(state, jax.tree.unflatten(tree, wanted))
        file = folder / f"{number}.npy"
        np.save(file, np.asarray(jax.tree.leaves(read)[number]))
        mapped.append(np.load(file, mmap_mode="r"))
    return jax.tree.unflatten(tree, mapped)


def _check_shapes(state: Path, declared: Weights[Weight]) -> None:
    """Raise ValueError unless the state has arrays of these shapes, which reading would cut or pad."""
    found = {name: tuple(each.shape) for name, each in _named(stored_arrays(state)["w"]).items()}
    wanted = {name: weight.shape for name, weight in _named(declared).items()}
    for name in sorted(found.keys() | wanted.keys()):
        here, there = found.get(name), wanted.get(name)
        if here != there:
            raise ValueError(f"{name} has the shape {here}, and in the base model {there}")


def _named(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
