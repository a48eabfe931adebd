"""Rotary positions of a sequence of text and images: time, row and column of each token. Pure.

Dimension key: T token.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np


class ImageSpan(NamedTuple):
    """Says where an image's tokens stand in a sequence. Their number is that of the merged grid."""

    first: int  # index of its first token
    rows: int  # of tokens, not of patches
    columns: int

    @property
    def tokens(self) -> int:
        return self.rows * self.columns


def places(length: int, images: Iterable[ImageSpan]) -> tuple[np.ndarray, int]:
    """Return int32 [T, 3], and the shift that is added to the index of every later token.

    All tokens of an image have the time at which it begins; its rows and columns count from there, and the
    next token begins behind the longer side. ``images`` stand in their order and do not overlap.
    """
    found_T3 = np.repeat(np.arange(length, dtype=np.int32)[:, None], 3, axis=1)
    shift = 0
    for image in images:
        begin, end = image.first, image.first + image.tokens
        row, column = np.divmod(np.arange(image.tokens, dtype=np.int32), np.int32(image.columns))
        found_T3[begin:end, 0] = begin + shift
        found_T3[begin:end, 1] = row + (begin + shift)
        found_T3[begin:end, 2] = column + (begin + shift)
        shift += max(image.rows, image.columns) - image.tokens
        found_T3[end:] = np.arange(end + shift, length + shift, dtype=np.int32)[:, None]
    return found_T3, shift
