"""Maps the tensors of a Hugging Face checkpoint, in safetensors files. No JAX."""

import json
from collections.abc import Collection
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from spmd_tx.errors import StartError
from spmd_tx.models.checkpoint.index import INDEX_FILE, SINGLE_FILE, read_index

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
    """Opens the safetensors files of one checkpoint and finds tensors in them.

    A tensor that several files have is read from the one that the index names.
    """

    def __init__(self, model_dir: Path) -> None:
        """Raise StartError unless all files are there and whole."""
        self.model_dir = model_dir
        listed = _listed(model_dir)
        paths = sorted(set(listed.values())) or [model_dir / SINGLE_FILE]
        self._open = {path: MappedFile(path) for path in paths}
        self._file_of = {name: path for path, file in self._open.items() for name in file.names} | listed

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
                f"{self.model_dir} has no tensor {name!r}, which its config.json calls for; "
                "weights and config.json must be of the same model"
            )
        return self._open[path].tensor(name)


class MappedFile:
    """Maps one safetensors file into memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with safe_open(path, framework="np"):
                pass  # the library checks the header, and that the file is complete
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                self._tensors = json.loads(file.read(length))
            self._content = np.memmap(path, np.uint8, "r")[8 + length :]
        except (SafetensorError, OSError, ValueError) as problem:
            raise StartError(
                f"cannot read {path}: {problem}; it may be damaged or only half downloaded, so download the "
                "model again"
            ) from None
        self._tensors.pop("__metadata__", None)

    @property
    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def tensor(self, name: str) -> np.ndarray:
        """Return a view of the file."""
        entry = self._tensors.get(name)
        if entry is None:
            raise StartError(
                f"{self._path} has no tensor {name!r}, although {INDEX_FILE} says so; download both again"
            )
        dtype = DTYPES.get(entry["dtype"])
        if dtype is None:
            raise StartError(
                f"{self._path}: {name} is stored as {entry['dtype']}, which is not read; "
                f"convert the model to one of {', '.join(DTYPES)}"
            )
        start, end = entry["data_offsets"]
        return self._content[start:end].view(dtype).reshape(entry["shape"])


def _listed(model_dir: Path) -> dict[str, Path]:
    """Return the files of the tensors that the index lists: none where there is a single file."""
    if (model_dir / SINGLE_FILE).exists():
        return {}
    if not (model_dir / INDEX_FILE).exists():
        raise StartError(
            f"{model_dir} holds no weights: expected {SINGLE_FILE}, or {INDEX_FILE} and the files it names; "
            "other formats are not read"
        )
    files = {name: model_dir / file for name, file in read_index(model_dir / INDEX_FILE).items()}
    for path in sorted(set(files.values())):
        if not path.exists():
            raise StartError(f"{path} does not exist, but {INDEX_FILE} names it; download it")
    return files
