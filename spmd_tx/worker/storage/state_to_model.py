"""Reads the weights of a whole model's training checkpoint (Orbax) and writes the model, outside a worker."""

import itertools
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import numpy as np

from spmd_tx.models.base_weights import Weights, weights
from spmd_tx.models.checkpoint.files import Files
from spmd_tx.models.config import read_model_config
from spmd_tx.sharding.mesh import make_mesh
from spmd_tx.sharding.weight import Weight
from spmd_tx.worker.storage.checkpoints import by_name, reading_for_export, stored_arrays
from spmd_tx.worker.storage.full_weights import write_model
from spmd_tx.worker.storage.stored_array import StoredArray

CPU = "cpu"


def write_model_of_state(state: Path, place: Path, model_dir: Path) -> None:
    """Write the folder ``place`` in the type of the base in ``model_dir``, whose other files it gets.

    Raises StartError when ``state`` is no training checkpoint of this model. Weights are read a layer at a
    time. Arrays in other chunks, as earlier versions stored them, wait in the folder for temporary files.
    """
    jax.config.update("jax_platforms", CPU)  # accelerators may belong to a server
    model, mesh = read_model_config(model_dir), make_mesh(1, 1, 1)
    dtype = Files(model_dir).tensor(model.embed.name).dtype
    declared = weights(model, mesh, dtype)
    with reading_for_export(state):
        names = _names(state, declared)
    with TemporaryDirectory(prefix="spmd-tx-export-") as folder:
        files = (Path(folder) / f"{number}.npy" for number in itertools.count())
        w = jax.tree.map(lambda name: _opened(StoredArray(state, name), next(files)), names)
        write_model(place, w, declared, model, model_dir)


def _opened(array: StoredArray, file: Path) -> StoredArray | np.ndarray:
    return array if array.is_stored_in_order else array.copy(file)


def _names(state: Path, declared: Weights[Weight]) -> Weights[str]:
    """Return the names of the arrays in the state. Raises ValueError unless they have these shapes."""
    stored = by_name(stored_arrays(state)["w"])
    shapes = {name: tuple(each.shape) for name, each in stored.items()}
    wanted = {name: weight.shape for name, weight in by_name(declared).items()}
    for name in sorted(shapes.keys() | wanted.keys()):
        here, there = shapes.get(name), wanted.get(name)
        if here != there:
            raise ValueError(f"{name} has the shape {here}, and in the base model {there}")
    return jax.tree.unflatten(jax.tree.structure(declared), [stored[name].name for name in wanted])
