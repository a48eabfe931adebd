"""Reads one array of an Orbax checkpoint piece by piece, without a device."""

import itertools
import math
from pathlib import Path

import numpy as np
import tensorstore as ts

from spmd_tx.errors import StartError

MOST_BYTES = 32 << 20  # of what is read for one index, if its chunks hold several


class StoredArray:
    """Holds none of its numbers; reading some takes the memory of the chunks that they lie in."""

    def __init__(self, checkpoint: Path, name: str) -> None:
        """Raises StartError when there is no such array."""
        self._title = f"{name} of {checkpoint}"
        folder = {"driver": "file", "path": f"{checkpoint.absolute()}/"}
        store = {"driver": "ocdbt", "base": folder, "path": f"{name}/"}
        spec = {"driver": "zarr", "kvstore": store, "fill_missing_data_reads": False}
        try:
            self._stored = ts.open(spec, open=True, read=True).result()
        except ValueError as problem:
            raise self._damaged(problem) from problem

    @property
    def dtype(self) -> np.dtype:
        return self._stored.dtype.numpy_dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self._stored.shape

    @property
    def is_stored_in_order(self) -> bool:
        """Whether reading one index after the other reads no large chunk again and again."""
        together = self._chunk[0]  # along the first dimension
        return together == 1 or together * math.prod(self.shape[1:]) * self.dtype.itemsize <= MOST_BYTES

    def __getitem__(self, index: int | slice | tuple[slice, ...]) -> np.ndarray:
        """Read an index or indices along the first dimension, or a range of each; none beyond an end."""
        try:
            return self._stored[index].read().result()
        except (ValueError, OSError) as problem:
            raise self._damaged(problem) from problem

    def copy(self, file: Path) -> np.ndarray:
        """Write the array to a file, each chunk once, and return it mapped into memory."""
        mapped = np.lib.format.open_memmap(file, "w+", self.dtype, self.shape)
        starts = (range(0, size, step) for size, step in zip(self.shape, self._chunk, strict=True))
        for start in itertools.product(*starts):
            piece = tuple(
                slice(first, min(first + step, size))
                for first, step, size in zip(start, self._chunk, self.shape, strict=True)
            )
            mapped[piece] = self[piece]
        mapped.flush()
        return mapped

    @property
    def _chunk(self) -> tuple[int, ...]:
        shape = self._stored.chunk_layout.read_chunk.shape
        assert shape is not None
        return tuple(each or 1 for each in shape)

    def _damaged(self, problem: Exception) -> StartError:
        return StartError(f"{self._title} cannot be read, or is damaged: {problem}")
