"""The images of a prompt: what commands read of them, and where tokens are for the model. Pure."""

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from spmd_tx.coordinator.images.prepared import ImageKey
from spmd_tx.coordinator.images.seen import SeenImage, SeenImages
from spmd_tx.images.placed import PlacedImage
from spmd_tx.images.places import places

AXES = 3  # time, row and column


class PromptImages:
    """Holds the images of a prompt."""

    def __init__(self, placed: Sequence[PlacedImage], seen: SeenImages) -> None:
        self._placed, self._seen = placed, seen

    def within(self, first: int, end: int) -> list[SeenImage]:
        """Return the images of which there are tokens from ``first`` on, before ``end``."""
        return [self._seen[image.digest] for image in self._placed if image.first < end and first < image.end]

    @property
    def shift(self) -> int:
        """What is added to the index of tokens behind the images, 0 or less."""
        return self._places[1]

    def places(self, first: int, end: int) -> np.ndarray:
        """Return time, row and column int32 [end - first, 3] of tokens, also of drawn ones."""
        known, shift = self._places
        later = np.arange(max(first, len(known)), max(end, len(known)), dtype=np.int32) + np.int32(shift)
        return np.concatenate([known[first:end], np.repeat(later[:, None], AXES, axis=1)])

    def fill(self, tokens: np.ndarray, first: int, ids: Mapping[ImageKey, np.ndarray]) -> None:
        """Put the ids of image tokens into the prompt's tokens from ``first`` on."""
        for image in self._placed:
            begin, end = max(image.first, first), min(image.end, first + len(tokens))
            if begin < end:
                its_ids = ids[self._seen[image.digest].key]
                tokens[begin - first : end - first] = its_ids[begin - image.first : end - image.first]

    @cached_property
    def _places(self) -> tuple[np.ndarray, int]:
        """The places of all tokens up to the end of the last image, and the shift."""
        spans = [self._seen[image.digest].span(image.first) for image in self._placed]
        return places(self._placed[-1].end, spans)
