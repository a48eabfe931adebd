"""Logits of prompts with images equal those of transformers, in every family that sees."""

import jax
import numpy as np
import pytest

from spmd_tx.models.attention.rope import angles
from spmd_tx.models.families.registry import declare
from spmd_tx.sharding.mesh import make_mesh
from tests.golden.vision_cases import (
    CONFIGS,
    NUMBERS,
    PROMPT,
    ROWS,
    VOCABULARY,
    is_image,
    text,
)
from tests.support.family_logits import Images, logits
from tests.support.towers import encoded, load, padded

pytestmark = pytest.mark.usefixtures("quickly_compiled")

GOLDEN = np.load(NUMBERS)
TOLERANCE = 1e-5  # relative to the largest logit
SHAPES = [(1, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)]
QUICK = [("qwen3_5", (2, 1, 2)), ("qwen3_vl_moe", (1, 2, 2))]


def pool_of(tower, w):
    """Return [P, S, D] with the tokens of the prompt's images, one image behind the other."""
    grids = [piece for piece in PROMPT if not isinstance(piece, int)]
    found = [np.asarray(encoded(tower, w, padded(grid, 1024), np.int32(grid))) for grid in grids]
    lengths = [rows * columns // 4 for rows, columns in grids]
    pool = np.concatenate([x[:, :length] for x, length in zip(found, lengths, strict=True)], axis=1)
    return np.pad(pool, ((0, 0), (0, -pool.shape[1] % 64), (0, 0)))


@pytest.mark.parametrize(
    "name, shape",
    [
        pytest.param(name, shape, marks=[] if (name, shape) in QUICK else [pytest.mark.slow])
        for name in CONFIGS
        for shape in SHAPES
    ],
    ids=str,
)
def test_logits_equal_those_of_transformers(tmp_path, name, shape):
    tower, w = load(tmp_path, name)
    places = GOLDEN[f"{name}/places"]
    tokens = text()
    tokens[is_image()] = VOCABULARY + np.arange(is_image().sum())
    found = logits(make_mesh(*shape), tmp_path, tokens, images=Images(pool_of(tower, w), places))
    expected = GOLDEN[f"{name}/logits"]
    np.testing.assert_allclose(found[list(ROWS)], expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize("name, axes", [("qwen3_5", "0120"), ("qwen3_vl", "01201200")], ids=str)
def test_pairs_take_turns_between_time_row_and_column(name, axes):
    rope = declare(CONFIGS[name]).attention.rope
    assert "".join(map(str, rope.axes)) == axes
    width = 2 * len(axes)
    places = np.array([[[3, 50, 700]]], np.int32)
    turned = jax.jit(lambda places: angles(places, rope, width)[0])
    found = np.asarray(turned(places))[0, 0]
    alone = [np.asarray(turned(places[..., axis]))[0, 0] for axis in range(3)]
    assert np.array_equal(found, [alone[int(axis)][pair] for pair, axis in enumerate(axes)])
