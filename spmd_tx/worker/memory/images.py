"""Estimates the memory that an image takes on its way through the vision tower."""

from spmd_tx.models.declared.tower import MERGED, Tower
from spmd_tx.models.vision.tower import queries_at_once

FP32 = 4  # bytes


def encoding(tower: Tower, patches: int, itemsize: int) -> int:
    """Return the bytes of a device for an image of so many patches, padded.

    ``itemsize`` is of a number in the compute dtype. Tokens are there three times: those of this device's
    image, those that the devices hand round, and those that are written.
    """
    stream, scores = patches * tower.width, tower.heads * queries_at_once(patches) * patches
    inside = max(4 * stream, 2 * patches * tower.inner)  # queries, keys and values; the feed-forward part
    tokens = 3 * tower.planes * (patches // MERGED) * tower.out
    held = (3 + len(tower.deep)) * stream + inside + tokens
    return itemsize * held + FP32 * 2 * (stream + scores)
