"""Loads the towers of tiny models, and pads images for them."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from spmd_tx.models.checkpoint import huggingface
from spmd_tx.models.declared.tower import PATCH_NUMBERS, Tower
from spmd_tx.models.families.registry import declare
from spmd_tx.models.vision.tower import encode
from spmd_tx.models.vision.tower_weights import TowerWeights, tower_weights
from spmd_tx.sharding.mesh import make_mesh
from tests.golden.vision_cases import CONFIGS, patches, write

encoded = jax.jit(encode, static_argnums=0)  # traced once for each tower and size


def load(path: Path, name: str) -> tuple[Tower, TowerWeights[Array]]:
    """Write a tiny model, and return the declaration of its tower and the arrays."""
    tower = declare(CONFIGS[name]).tower
    assert tower is not None
    declared = tower_weights(tower, jnp.float32)
    return tower, huggingface.load(
        write(path, name), declared, make_mesh(1, 1, 1), lambda _: None, tower.unread
    )


def padded(grid: tuple[int, int], size: int, fill: int = 0) -> np.ndarray:
    """Return the patches of an image, uint8 [size, 768]."""
    found = np.full((size, PATCH_NUMBERS), fill, np.uint8)
    if grid[0] * grid[1]:
        found[: grid[0] * grid[1]] = patches(grid)
    return found
