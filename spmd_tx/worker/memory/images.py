"""Estimates the memory that an image takes on its way through the vision tower."""

import math
from collections.abc import Iterable

from spmd_tx.models.declared.layers import LayerArray
from spmd_tx.models.declared.maps import Map
from spmd_tx.models.declared.tower import FRAMES, MERGED, PATCH_NUMBERS, Tower
from spmd_tx.models.vision.attention import queries_at_once

FP32 = 4  # bytes


def encoding(tower: Tower, patches: int, itemsize: int, attention: str, devices: int) -> int:
    """Return the bytes of a device for an image of so many patches, padded.

    ``itemsize`` is of a number in the compute dtype, ``attention`` is that of Kernels. More ``devices`` than
    one gather the matrices that they use: those of two blocks, or those of the merger.
    """
    gathered = 0 if devices == 1 else max(2 * _numbers(tower.block), _numbers(tower.once))
    stream, kernel = patches * tower.width, tower.width * FRAMES * PATCH_NUMBERS
    deep = len(tower.deep)
    if attention != "reference":  # kernels hold no scores; XLA joins what is between products
        inside = max(4 * stream, patches * tower.inner)  # queries, keys and values; the feed-forward part
        return itemsize * (gathered + (3 + deep) * stream + inside) + FP32 * 3 * kernel
    scores = tower.heads * queries_at_once(patches) * patches
    inside = max(4 * stream, 2 * patches * tower.inner)
    # Those of this device's image, those that the devices hand round, and those that are written.
    tokens = 3 * tower.planes * (patches // MERGED) * tower.out
    held = gathered + (3 + deep) * stream + inside + tokens
    return itemsize * held + FP32 * 2 * (stream + scores)


def _numbers(arrays: Iterable[LayerArray]) -> int:
    return sum(
        each.width_in * each.width_out if isinstance(each, Map) else math.prod(each.shape) for each in arrays
    )
