"""Images in a sequence of tokens, and the ids that stand for their tokens. Pure."""

from typing import NamedTuple

import numpy as np

LAST_ID = -2  # -1 means no token
_IDS = 2**31 - 1  # all negative int32 but -1

# Of splitmix64 (Steele, Lea and Flood 2014)
_STEP, _FIRST, _SECOND = (
    np.uint64(each) for each in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


class PlacedImage(NamedTuple):
    """Says where an image's tokens stand in a sequence."""

    first: int  # index of its first token
    tokens: int
    digest: str  # of its file

    @property
    def end(self) -> int:
        """The index behind its last token."""
        return self.first + self.tokens


def image_ids(digest: str, tokens: int) -> np.ndarray:
    """Return ids int32 [tokens], all negative: a hash of the digest and of each place.

    Equal images have equal ids, so whatever compares tokens, as the prefix cache does, compares images.
    """
    mixed = np.arange(1, tokens + 1, dtype=np.uint64) * _STEP + np.uint64(int(digest[:16], 16))
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _FIRST
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _SECOND
    mixed ^= mixed >> np.uint64(31)
    return (LAST_ID - (mixed % np.uint64(_IDS)).astype(np.int64)).astype(np.int32)
