"""Target tokens: those whose log-probabilities a request asks for at its prompt's positions. Pure.

Dimension key: L prompt token, W most tokens named at one position.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spmd_tx.coordinator.wire.fields import TensorData
from spmd_tx.coordinator.wire.sampling_protobuf import TargetLogprobs
from spmd_tx.errors import InvalidRequest

NO_TOKEN = -1

MOST_COLUMNS = 2**31 - 1  # of the tensor, most of them empty

_WHAT = "target_prompt_logprobs"


@dataclass(frozen=True)
class TargetTokens:
    """Holds the named tokens in compact form, and the layout of the request."""

    tokens: np.ndarray  # int32 [L - 1, W]; NO_TOKEN beyond those that are named
    named: np.ndarray  # bool, for every cell of the request in its order
    rows: np.ndarray  # row in ``tokens`` of every named cell
    places: np.ndarray  # column in ``tokens`` of every named cell
    shape: tuple[int, ...]  # of the request's tensor
    row_starts: np.ndarray | None  # of a sparse tensor
    columns: np.ndarray | None  # of a sparse tensor

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    def answer(self, logprobs: np.ndarray) -> TargetLogprobs:
        """Lay out log-probabilities [L - 1, W or more] of ``tokens`` as the request was."""
        values = np.zeros(self.named.shape, np.float32)
        values[self.named] = logprobs[self.rows, self.places]
        return TargetLogprobs(values, self.shape, self.row_starts, self.columns)


def read(tensor: TensorData, prompt_length: int, vocab_size: int) -> TargetTokens:
    """Read a dense or sparse [L - 1, K] tensor. Raises InvalidRequest."""
    shape = tuple(tensor.shape or ())
    if tensor.dtype != "int64" or len(shape) != 2:
        raise InvalidRequest(
            f"{_WHAT} has dtype {tensor.dtype[:20]!r} and {len(shape)} dimensions; send an int64 tensor of "
            "shape [prompt length - 1, K]"
        )
    if not 0 <= shape[1] <= MOST_COLUMNS:
        raise InvalidRequest(f"{_WHAT} has {shape[1]} columns; it must have 0 to {MOST_COLUMNS}")
    if shape[0] != prompt_length - 1:
        raise InvalidRequest(
            f"{_WHAT} has the shape {list(shape)} and the prompt has {prompt_length} tokens; send "
            f"{prompt_length - 1} rows, one for each token but the first"
        )
    tokens = _whole_numbers(tensor.data)
    rows, row_starts, columns = _layout(tensor, len(tokens), (shape[0], shape[1]))
    wrong = tokens[(tokens < NO_TOKEN) | (tokens >= vocab_size)]
    if wrong.size:
        raise InvalidRequest(
            f"{_WHAT} has the token ID {wrong[0]}; IDs of this model are 0 to {vocab_size - 1}, "
            f"and {NO_TOKEN} stands for none"
        )
    named = tokens != NO_TOKEN
    if not named.any():
        raise InvalidRequest(f"{_WHAT} names no token; name at least one, or leave it out")
    rows = rows[named]
    # Rows come in order, so a cell's place is its distance from the first one of its row.
    firsts = np.flatnonzero(np.diff(rows, prepend=-1))
    places = np.arange(rows.size) - np.repeat(firsts, np.diff(firsts, append=rows.size))
    compact = np.full((shape[0], int(places.max()) + 1), NO_TOKEN, np.int32)
    compact[rows, places] = tokens[named]
    return TargetTokens(compact, named, rows, places, shape, row_starts, columns)


def _whole_numbers(data: list[float]) -> np.ndarray:
    values = np.asarray(data, np.float64)
    if not np.isfinite(values).all() or (values != np.floor(values)).any() or (np.abs(values) > 2**53).any():
        raise InvalidRequest(f"{_WHAT} holds numbers that are not token IDs; send whole numbers")
    return values.astype(np.int64)


def _layout(
    tensor: TensorData, cells: int, shape: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
    """Return the row of every cell, and the row starts and columns of a sparse tensor."""
    starts, columns = tensor.sparse_crow_indices, tensor.sparse_col_indices
    if starts is None and columns is None:
        if cells != shape[0] * shape[1]:
            raise InvalidRequest(
                f"{_WHAT} holds {cells} values and its shape {list(shape)} wants {shape[0] * shape[1]}"
            )
        return np.repeat(np.arange(shape[0]), shape[1]), None, None
    row_starts, places = _indices(starts), _indices(columns)
    is_consistent = (
        starts is not None
        and columns is not None
        and row_starts.size == shape[0] + 1
        and places.size == cells
        and row_starts[0] == 0
        and row_starts[-1] == cells
        and bool((np.diff(row_starts) >= 0).all())
        and bool(((places >= 0) & (places < shape[1])).all())
    )
    if not is_consistent:
        raise InvalidRequest(
            f"{_WHAT} is sparse, and its indices do not fit its shape {list(shape)} and {cells} values"
        )
    return np.repeat(np.arange(shape[0]), np.diff(row_starts)), row_starts, places


def _indices(numbers: Sequence[int] | None) -> np.ndarray:
    """Return indices as an array; one that no index fits is -1."""
    try:
        return np.asarray(numbers or (), np.int64)
    except OverflowError:
        return np.full(len(numbers or ()), -1)
