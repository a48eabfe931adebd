"""Compares the heads that a checkpoint stores with the embedding to which they are tied. No JAX."""

import numpy as np

from spmd_tx.errors import StartError
from spmd_tx.models.checkpoint.files import Files
from spmd_tx.models.declared.unread import Unread

AT_ONCE = 1 << 22  # numbers that are compared together


def check_copies(tensors: Files, unread: Unread) -> None:
    """Raise StartError where a head is not what it is tied to."""
    for name in unread.copies(tensors.names):
        assert unread.copied is not None
        if not _are_equal(tensors.tensor(name), tensors.tensor(unread.copied)):
            raise StartError(
                f"{tensors.model_dir} has a head of its own, {name}, which differs from {unread.copied}, "
                "although its config.json ties the two; set tie_word_embeddings to false there to serve this "
                "head, or remove the tensor if the model was trained without it"
            )


def _are_equal(one: np.ndarray, other: np.ndarray) -> bool:
    if one.shape != other.shape:
        return False
    step = max(1, AT_ONCE // max(1, one[:1].size))
    parts = ((one[first : first + step], other[first : first + step]) for first in range(0, len(one), step))
    return all(np.array_equal(_comparable(a), _comparable(b)) for a, b in parts)


def _comparable(part: np.ndarray) -> np.ndarray:
    return part.astype(np.float32) if part.dtype.itemsize < np.dtype(np.float32).itemsize else part
