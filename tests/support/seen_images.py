"""Makes images as requests have them, without decoding any."""

from collections.abc import Iterable

import numpy as np

from spmd_tx.coordinator.images.prepared import ImageKey, PreparedImage
from spmd_tx.coordinator.images.seen import SeenImage, SeenImages

NUMBERS = 768  # of a patch


def seen(name: str, rows: int = 16, columns: int = 16, owner: str = "alice") -> SeenImage:
    """Return an image of so many patches, whose content follows from its name."""
    random = np.random.default_rng([*name.encode(), rows, columns])
    patches = random.integers(0, 256, (rows * columns, NUMBERS), np.uint8)
    return SeenImage(ImageKey(owner, name), PreparedImage(patches, rows, columns, name))


def together(images: Iterable[SeenImage]) -> SeenImages:
    return SeenImages({image.key.digest: image for image in images})
