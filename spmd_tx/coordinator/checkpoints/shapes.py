"""Compares the arrays of a checkpoint with the base model that is served. All functions block.

Its name alone does not tell the base model of a checkpoint: two may have the same one. Workers, which would
be lost over arrays of other shapes, get what was compared here.
"""

import json
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import tensorstore as ts
from safetensors import SafetensorError, safe_open

from spmd_tx.coordinator.checkpoints.files import Manifest
from spmd_tx.errors import InvalidRequest, StartError
from spmd_tx.models.adapter_formats.files import CONFIG_FILE, WEIGHTS_FILE, modules, spelling, stored_names
from spmd_tx.models.config import read_model_config
from spmd_tx.models.declared.model import Model
from spmd_tx.models.declared.state_shapes import RANK, ArrayShape, of_adapter, of_model

ARRAYS, METADATA = "manifest.ocdbt", "_METADATA"  # in the folder of a training checkpoint
WEIGHTS = "w."  # with which the names of weights begin there; those of moments are alike
MODEL_CONFIG = "config.json"  # in the folder of a whole model
SIZES = "its layers, heads and their width, feed-forward blocks, channels and vocabulary"


class ServedShape(NamedTuple):
    """Holds the shape of an array in the base model that is served."""

    shape: ArrayShape
    has_any_rank: bool = False  # whether the dimension RANK may differ, as servers pad it or not

    def is_of(self, stored: ArrayShape | None) -> bool:
        """Whether an array has the shape, but for its rank."""
        return stored is not None and self._without_rank(stored) == self._without_rank(self.shape)

    def _without_rank(self, shape: ArrayShape) -> ArrayShape:
        return (*shape[:RANK], *shape[RANK + 1 :]) if self.has_any_rank else shape


def check_shapes(title: str, folder: Path, manifest: Manifest, model: Model, base_model: str) -> None:
    """Raise InvalidRequest where the checkpoint is of another base model than the one that is served."""
    if (folder / CONFIG_FILE).exists():
        expected = _of_peft(manifest, model)
        actual = _stored_by_peft(folder / WEIGHTS_FILE, title)
    elif (folder / ARRAYS).exists():
        expected = _of_state(manifest, model)
        actual = {name: _stored(folder, name) for name in _names(folder, title)}
    elif (folder / MODEL_CONFIG).exists():
        expected = {SIZES: ServedShape(_sizes(model))}
        actual = {SIZES: _sizes(_model_of(folder, title))}
    else:
        return
    others = sorted(name for name, shape in actual.items() if shape is not None and name not in expected)
    for name in (*expected, *others):
        stored, served = actual.get(name), expected.get(name)
        if stored is None or served is None or not served.is_of(stored):
            raise InvalidRequest(
                f"{title} was trained on a base model {manifest.base_model!r}, in which {name} is "
                f"{_shown(stored)}; in {base_model!r}, which this model is one of, it is "
                f"{_shown(served.shape if served else None)}; use a checkpoint of this model"
            )


def _shown(shape: ArrayShape | None) -> str:
    return "not there" if shape is None else str(list(shape))


def _of_peft(manifest: Manifest, model: Model) -> dict[str, ServedShape]:
    """Return those of factors by their names in ``spelling``."""
    each = (module.shapes.items() for module in modules(manifest.adapter, model))
    return {spelling(name): ServedShape(shape) for name, shape in chain.from_iterable(each)}


def _of_state(manifest: Manifest, model: Model) -> dict[str, ServedShape]:
    if manifest.rank:
        arrays = of_adapter(model, manifest.rank)
        return {name: ServedShape(shape, has_any_rank=True) for name, shape in arrays}
    return {name: ServedShape(shape) for name, shape in of_model(model)}


def _stored_by_peft(path: Path, title: str) -> dict[str, ArrayShape | None]:
    try:
        with safe_open(path, framework="np") as file:
            stored = stored_names(file.keys())
            return {name: tuple(file.get_slice(each).get_shape()) for name, each in stored.items()}
    except (SafetensorError, FileNotFoundError) as problem:
        raise InvalidRequest(f"{title} is damaged: {problem}; use another one") from None


def _names(folder: Path, title: str) -> set[str]:
    """Return the names of the weights in a training checkpoint."""
    try:
        described = json.loads((folder / METADATA).read_bytes())["tree_metadata"].values()
        names = {".".join(key["key"] for key in each["key_metadata"]) for each in described}
    except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError) as problem:
        raise InvalidRequest(f"{title} is damaged: {METADATA} cannot be read: {problem!r}") from None
    return {name for name in names if name.startswith(WEIGHTS)}


def _stored(folder: Path, name: str) -> ArrayShape | None:
    """Return the shape of an array; None: there is none."""
    base = {"driver": "file", "path": f"{folder.absolute()}/"}
    store = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    try:
        return ts.open({"driver": "zarr", "kvstore": store}, open=True, read=True).result().shape
    except ValueError:
        return None


def _model_of(folder: Path, title: str) -> Model:
    try:
        return read_model_config(folder)
    except StartError as problem:
        raise InvalidRequest(f"{title} is damaged: {problem}; use another one") from None


def _sizes(model: Model) -> ArrayShape:
    heads = model.n_layers, model.n_heads, model.n_kv_heads, model.head_dim
    return (*heads, model.d_ff, model.d_model, model.vocab_size)
