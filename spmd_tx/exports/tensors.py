"""Describes the tensors of a merged checkpoint, and yields their content piece by piece. No JAX."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from spmd_tx.exports.merge import Merge
from spmd_tx.models.checkpoint.encoders import encode
from spmd_tx.models.checkpoint.encodings import decode
from spmd_tx.models.checkpoint.files import DTYPES, Files
from spmd_tx.models.declared.encoding import Encoding, Fp8Blocks
from spmd_tx.models.declared.model import Model
from spmd_tx.models.declared.unread import is_head

AT_ONCE = 1 << 24  # numbers of a matrix that are computed with together
FLOATS = {"bfloat16": "BF16", "float32": "F32", "float16": "F16"}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class ResultTensor:
    """Describes one tensor of the result."""

    name: str
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    base: str  # the tensor of the base model that it is made from
    encoding: Encoding | None = None  # how the base model stores that one
    part: str = ""  # "numbers", "scales" or "shape" of an encoded result

    @property
    def size(self) -> int:
        """In bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class ResultTensors:
    """Holds the base model's files, and an adapter that is added to them; None: they stay as they are."""

    def __init__(self, files: Files, model: Model, merge: Merge | None, dtype: str | None) -> None:
        """``dtype`` is one of FLOATS; None: each tensor stays as the base model has it, also encoded."""
        self._files, self._merge = files, merge
        self.dtype = dtype
        self._changes = {} if merge is None else merge.changes
        self._parts = _encoded_parts(files, model)
        self._scales: tuple[str, list[np.ndarray]] = "", []  # of the matrix whose numbers came last

    @property
    def is_encoded(self) -> bool:
        """Whether the result has matrices in fewer bits, which its config.json must declare."""
        return bool(self._parts) and self.dtype is None

    def made_of(self, names: Iterable[str]) -> list[ResultTensor]:
        """Return what becomes of some tensors of the base model."""
        untied = {c.copied_from: n for n, c in self._changes.items() if c.copied_from is not None}
        stored = (name for name in names if not (untied and is_head(name)))  # tied heads may be stored, too
        tensors = [tensor for name in stored for tensor in self._of(name)]
        return tensors + [replace(each, name=untied[each.base]) for each in tensors if each.base in untied]

    def _of(self, name: str) -> list[ResultTensor]:
        stored = self._files.tensor(name)
        if name not in self._parts:
            dtype = NAMES[stored.dtype]
            if self.dtype is not None and dtype in FLOATS.values():
                dtype = FLOATS[self.dtype]
            return [ResultTensor(name, dtype, stored.shape, name)]
        base, encoding, part = self._parts[name]
        if self.dtype is None:
            return [ResultTensor(name, NAMES[stored.dtype], stored.shape, base, encoding, part)]
        if part != "numbers":
            return []
        return [ResultTensor(base, FLOATS[self.dtype], self._shape(base, encoding), base, encoding)]

    def content(self, tensor: ResultTensor) -> Iterator[np.ndarray]:
        """Yield the tensor's numbers from the first to the last, some rows at a time."""
        changed = tensor.name if tensor.encoding is None else tensor.base
        is_changed = changed in self._changes
        if tensor.part == "shape" or (not is_changed and (tensor.encoding is None or tensor.part)):
            yield from self._copied(tensor)
        elif tensor.part == "scales" and self._scales[0] == tensor.base:
            yield from self._scales[1]
        elif tensor.encoding is not None and tensor.part:
            yield from self._encoded(tensor, tensor.encoding)
        else:
            for matrix, first, rows in self._rows(tensor):
                if is_changed and self._merge is not None:
                    self._merge.add(changed, matrix, first, rows)
                yield rows.astype(DTYPES[tensor.dtype])

    def _encoded(self, tensor: ResultTensor, encoding: Encoding) -> Iterator[np.ndarray]:
        """Yield the numbers, and keep the scales, which mostly follow; or yield the scales alone."""
        self._scales = tensor.base, []
        for matrix, first, rows in self._rows(tensor):
            if self._merge is not None:
                self._merge.add(tensor.base, matrix, first, rows)
            numbers, scales = encode(encoding, rows)
            self._scales[1].append(scales)
            yield scales if tensor.part == "scales" else numbers

    def _copied(self, tensor: ResultTensor) -> Iterator[np.ndarray]:
        flat = self._files.tensor(tensor.name).reshape(-1)
        for start in range(0, flat.size, AT_ONCE):
            yield flat[start : start + AT_ONCE].astype(DTYPES[tensor.dtype], copy=False)

    def _rows(self, tensor: ResultTensor) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield (matrix, number of the first row, float32 [rows, columns]) of the base model's tensor."""
        *lead, height, width = self._shape(tensor.base, tensor.encoding)
        block = tensor.encoding.rows if isinstance(tensor.encoding, Fp8Blocks) else 1
        step = max(1, AT_ONCE // (width * block)) * block
        for matrix, index in enumerate(np.ndindex(*lead)):
            for first in range(0, height, step):
                rows = slice(first, min(first + step, height))
                yield matrix, first, self._decoded(tensor, index, rows, width)

    def _decoded(self, tensor: ResultTensor, index: tuple[int, ...], rows: slice, width: int) -> np.ndarray:
        if tensor.encoding is None:
            return self._files.tensor(tensor.base)[index][rows].astype(np.float32)
        numbers, scales = (self._files.tensor(name)[index] for name in _names(tensor.encoding, tensor.base))
        of_scale = tensor.encoding.rows if isinstance(tensor.encoding, Fp8Blocks) else 1
        scales = scales[rows.start // of_scale : -(-rows.stop // of_scale)]
        place = np.empty((rows.stop - rows.start, width), ml_dtypes.bfloat16)  # as they are loaded to train
        decode(tensor.encoding, numbers[rows], scales, place)
        return place.astype(np.float32)

    def _shape(self, base: str, encoding: Encoding | None) -> tuple[int, ...]:
        if encoding is None:
            return self._files.tensor(base).shape
        numbers, scales = (self._files.tensor(name).shape for name in _names(encoding, base))
        return numbers if isinstance(encoding, Fp8Blocks) else (*scales[:-1], scales[-1] * encoding.group)


def _encoded_parts(files: Files, model: Model) -> dict[str, tuple[str, Encoding, str]]:
    """Return (name of the matrix, its encoding, which part it is) for stored tensors in fewer bits."""
    arrays = (array for place in model.places for array in model.arrays(place))
    kinds = {array.source.encoding for array in arrays} - {None}
    roles: dict[str, tuple[str, Encoding, str]] = {}
    for encoding in kinds:
        suffix = _names(encoding, "")[1]
        for base in (name.removesuffix(suffix) for name in files.names if name.endswith(suffix)):
            numbers, scales = _names(encoding, base)
            if numbers in files.names:
                roles |= {numbers: (base, encoding, "numbers"), scales: (base, encoding, "scales")}
                if f"{base}_shape" in files.names:
                    roles[f"{base}_shape"] = (base, encoding, "shape")
    return roles


def _names(encoding: Encoding, base: str) -> tuple[str, ...]:
    """Return the names of the tensors with the numbers and the scales of a matrix."""
    return tuple(part.name for part in encoding.parts(base, (1, encoding.group)))
