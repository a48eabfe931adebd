"""Finds and maps the tensors of a Hugging Face checkpoint, in safetensors files. No JAX."""

import json
from collections.abc import Collection
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import safe_open

from spmd_tx.errors import StartError

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
ENCODED = {  # types of encoded numbers and their scales that no plain weight has, by their safetensors names
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
}
DTYPES = {  # by their names in safetensors files
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    **ENCODED,
}


class Files:
    """Opens the safetensors files of one checkpoint and finds tensors in them."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._file_of = _find_tensors(model_dir)
        self._open: dict[Path, MappedFile] = {}

    @property
    def model_dir(self) -> Path:
        return self._model_dir

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors."""
        return self._file_of.keys()

    def file_of(self, name: str) -> Path:
        return self._file_of[name]

    def tensor(self, name: str) -> np.ndarray:
        """Return the tensor, of which nothing has been read yet."""
        path = self._file_of.get(name)
        if path is None:
            raise StartError(
                f"{self._model_dir} has no tensor {name!r}, which its config.json calls for; "
                "weights and config.json must be of the same model"
            )
        if path not in self._open:
            self._open[path] = MappedFile(path)
        return self._open[path].tensor(name)


class MappedFile:
    """Maps one safetensors file into memory."""

    def __init__(self, path: Path) -> None:
        with safe_open(path, framework="np"):
            pass  # the library checks the header, and that the file is complete
        self._path = path
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            self._tensors = json.loads(file.read(length))
        self._content = np.memmap(path, np.uint8, "r")[8 + length :]

    def tensor(self, name: str) -> np.ndarray:
        """Return a view of the file."""
        found = self._tensors.get(name)
        if found is None:
            raise StartError(f"{self._path} has no tensor {name!r}, although {INDEX_FILE} says so")
        dtype = DTYPES.get(found["dtype"])
        if dtype is None:
            raise StartError(
                f"{self._path}: {name} is stored as {found['dtype']}, which is not read; "
                f"convert the model to one of {', '.join(DTYPES)}"
            )
        start, end = found["data_offsets"]
        return self._content[start:end].view(dtype).reshape(found["shape"])


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
        raise StartError(f"{index} is not a safetensors index: {problem!r}; download it again") from None
    for file in sorted(set(weight_map.values())):
        if not (index.parent / file).exists():
            raise StartError(f"{index.parent / file} does not exist, but {index.name} names it; download it")
    return {name: index.parent / file for name, file in weight_map.items()}
