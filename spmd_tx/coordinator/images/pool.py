"""The pool of images' tokens on the devices: which rows have which image, and what must be encoded. Pure.

Workers run commands in the order in which they are sent. So what a command reads is placed right before it is
sent, and its rows may be given to others by the next one.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from spmd_tx.coordinator.images.prepared import ImageKey
from spmd_tx.coordinator.images.seen import MERGE, SeenImage
from spmd_tx.protocol.commands import PREFILL_TOKENS, EncodeImages

PATCH_BYTES = 64 << 20  # of one command at most; one image may have more


class PlacedImages(NamedTuple):
    """Says what to send before a command that reads images, and with which ids it reads them."""

    commands: list[EncodeImages]
    ids: Mapping[ImageKey, np.ndarray]  # int32 [tokens]: what stands for each token of an image


class ImagePool:
    """Gives rows to images; those that were read longest ago make room."""

    def __init__(self, rows: int = 0, devices: int = 1, vocab_size: int = 0) -> None:
        """``rows`` 0: no images are read. Each of the ``devices`` encodes one image of a command."""
        self.rows = rows
        self._devices, self._vocab_size = devices, vocab_size
        self.clear()

    def clear(self) -> None:
        """Forget all images."""
        self._free = np.arange(self.rows, dtype=np.int32)
        self._placed: dict[ImageKey, np.ndarray] = {}  # rows of each image; those read last come last

    def fits(self, images: Iterable[SeenImage]) -> bool:
        """Return whether one command may read all of these."""
        return sum(image.tokens for image in _distinct(images)) <= self.rows

    def takes(self, images: Iterable[SeenImage]) -> bool:
        """Return whether chunks of a prompt with these images find room, wherever they are cut."""
        tokens = sorted(image.tokens for image in _distinct(images))
        return sum(tokens) <= self.rows or sum(tokens[-2:]) + PREFILL_TOKENS <= self.rows

    def place(self, images: Iterable[SeenImage]) -> PlacedImages:
        """Give rows to images, which must fit. The commands must be sent before the one that reads them."""
        wanted = _distinct(images)
        for image in wanted:
            if (rows := self._placed.pop(image.key, None)) is not None:
                self._placed[image.key] = rows
        missing = [image for image in wanted if image.key not in self._placed]
        self._make_room(sum(image.tokens for image in missing))
        for image in missing:
            self._placed[image.key], self._free = np.split(self._free, [image.tokens])
        commands = [self._command(group) for group in self._groups(missing)]
        ids = {image.key: self._placed[image.key] + np.int32(self._vocab_size) for image in wanted}
        return PlacedImages(commands, ids)

    def _make_room(self, tokens: int) -> None:
        """Take rows from images that are not wanted: those that are come behind them."""
        while len(self._free) < tokens:
            rows = self._placed.pop(next(iter(self._placed)))
            self._free = np.concatenate([self._free, rows])

    def _groups(self, images: Collection[SeenImage]) -> Iterator[list[SeenImage]]:
        """Yield the images of each command: padded alike, in their order."""
        groups: dict[int, list[SeenImage]] = {}
        for image in images:
            size = image.program.patches
            group = groups.setdefault(size, [])
            if group and (len(group) + 1) * image.prepared.patches[0].nbytes * size > PATCH_BYTES:
                yield groups.pop(size)
                group = groups.setdefault(size, [])
            group.append(image)
            if len(group) == self._devices:
                yield groups.pop(size)
        yield from groups.values()

    def _command(self, images: list[SeenImage]) -> EncodeImages:
        size, numbers = images[0].program.patches, images[0].prepared.patches.shape[1]
        patches = np.zeros((len(images), size, numbers), np.uint8)
        rows = np.full((len(images), size // MERGE**2), -1, np.int32)
        for place, image in enumerate(images):
            patches[place, : len(image.prepared.patches)] = image.prepared.patches
            rows[place, : image.tokens] = self._placed[image.key]
        grids = [(image.prepared.rows, image.prepared.columns) for image in images]
        return EncodeImages(patches=patches, grids=np.array(grids, np.int32), rows=rows)


def _distinct(images: Iterable[SeenImage]) -> list[SeenImage]:
    return list({image.key: image for image in images}.values())
