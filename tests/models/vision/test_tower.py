"""Tokens of images equal those of transformers, whatever stands behind the image's end."""

import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.errors import StartError
from spmd_tx.models.checkpoint import huggingface
from spmd_tx.models.families.registry import declare
from spmd_tx.models.vision.tower_weights import tower_weights
from spmd_tx.sharding.mesh import make_mesh
from tests.golden.vision_cases import CONFIGS, GRIDS, NUMBERS, TOKENS, write
from tests.support.towers import encoded, load, padded

pytestmark = pytest.mark.usefixtures("quickly_compiled")

GOLDEN = np.load(NUMBERS)
TOLERANCE = 2e-6  # relative to the largest number
OTHERS = pytest.mark.slow  # whose towers are those of the dense models


@pytest.mark.parametrize(
    "name",
    ["qwen3_5", "qwen3_vl", *(pytest.param(f"qwen3_{each}_moe", marks=OTHERS) for each in ("5", "vl"))],
)
def test_tokens_equal_those_of_transformers(tmp_path, name):
    tower, w = load(tmp_path, name)
    for grid in GRIDS:
        expected = GOLDEN[f"{name}/tokens/{grid[0]}x{grid[1]}"]
        size = 256 if grid[0] * grid[1] <= 256 else 1024
        tokens = np.asarray(encoded(tower, w, padded(grid, size), np.int32(grid)))
        tokens = tokens[:, : grid[0] * grid[1] // 4]
        limit = TOLERANCE * np.abs(expected).max()
        np.testing.assert_allclose(tokens[:, list(TOKENS)], expected, rtol=0, atol=limit, err_msg=str(grid))


def test_what_is_behind_the_image_changes_no_bit(tmp_path):
    tower, w = load(tmp_path, "qwen3_vl")
    grid = (28, 10)
    first, second = (
        np.asarray(encoded(tower, w, padded(grid, 1024, fill), np.int32(grid)))[:, : 28 * 10 // 4]
        for fill in (0, 255)
    )
    assert np.array_equal(first, second)
    nothing = encoded(tower, w, padded((0, 0), 1024), np.int32((0, 0)))
    assert np.isfinite(nothing).all()


def test_all_tensors_of_the_tower_must_be_there_and_no_others(tmp_path):
    model = declare(CONFIGS["qwen3_vl"])
    path, mesh = write(tmp_path, "qwen3_vl"), make_mesh(1, 1, 1)
    declared = tower_weights(declare(CONFIGS["qwen3_5"]).tower, jnp.float32)
    with pytest.raises(StartError, match=r"12 tensors for which .*deepstack_merger_list"):
        huggingface.load(path, declared, mesh, lambda _: None, model.tower.unread)
