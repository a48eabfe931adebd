"""Tokens of an image have the same bits in any company, mesh and place, and when encoded again."""

import numpy as np
import pytest

from spmd_tx.protocol.commands import padded_patches
from tests.golden.vision_cases import text
from tests.support.seeing_engine import encode, forward, pool, start

GRID, COUNT = (22, 10), 55
COMPANY = [(16, 16), GRID, (12, 12), (8, 8), (10, 22), (4, 4), (14, 6), (6, 30)]
OTHER_SHAPES = [(1, 1, 4), (4, 1, 1), (2, 1, 2), (1, 2, 2)]


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """An engine of one device, and the tokens of an image that it has encoded alone."""
    engine = start(tmp_path_factory.mktemp("model"), "qwen3_vl_moe", (1, 1, 1))
    encode(engine, [GRID], 0)
    found = pool(engine)[:, :COUNT]
    assert np.abs(found).max() > 0
    return engine, found


@pytest.fixture(scope="module")
def alone(one_device):
    return one_device[1]


@pytest.mark.parametrize(
    "shape", [(2, 2, 2), *(pytest.param(each, marks=pytest.mark.slow) for each in OTHER_SHAPES)]
)
def test_an_image_has_the_same_bits_in_company_and_on_other_meshes(tmp_path, alone, shape):
    engine = start(tmp_path, "qwen3_vl_moe", shape)
    encode(engine, [GRID], 100)
    assert np.array_equal(pool(engine)[:, 100 : 100 + COUNT], alone)
    encode(engine, COMPANY[: engine.mesh.size], 7)  # an image for each device
    begin = 7 + COMPANY[0][0] * COMPANY[0][1] // 4
    assert np.array_equal(pool(engine)[:, begin : begin + COUNT], alone)


def test_rows_of_other_images_stay_as_they_are_until_they_are_taken(one_device):
    engine, alone = one_device
    encode(engine, [(12, 12)], 200)
    found = pool(engine)
    assert np.array_equal(found[:, :COUNT], alone)
    assert not found[:, COUNT:200].any()
    assert found[:, 200:236].any(axis=(0, 2)).all()
    assert not found[:, 236:].any()

    encode(engine, [(16, 16)], 0)  # in whose place the image is no more
    assert not np.array_equal(pool(engine)[:, :COUNT], alone)
    encode(engine, [GRID], 0)
    assert np.array_equal(pool(engine)[:, :COUNT], alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_vl"])
def test_text_has_the_bits_that_it_has_with_no_pool(tmp_path, name):
    tokens = text()[:128]
    with_pool = start(tmp_path / "a", name, (1, 1, 2))
    without = start(tmp_path / "b", name, (1, 1, 2), image_tokens=0)
    assert without.state.tower is None
    assert np.array_equal(forward(with_pool, tokens, None), forward(without, tokens, None))


@pytest.mark.parametrize(
    "count, padded", [(0, 256), (1, 256), (256, 256), (257, 512), (16384, 16384), (16388, 32768)]
)
def test_an_image_alone_decides_how_it_is_padded(count, padded):
    assert padded_patches(count) == padded
