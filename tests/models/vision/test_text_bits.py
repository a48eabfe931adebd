"""Text has the same bits beside a pool of image tokens, and with three equal axes of positions."""

import numpy as np
import pytest

from spmd_tx.models.families.registry import declare
from spmd_tx.sharding.mesh import make_mesh
from tests.golden.vision_cases import CONFIGS, text, write
from tests.support.family_logits import Images, logits


@pytest.mark.parametrize(
    "name, shape",
    [
        ("qwen3_vl", (1, 1, 1)),
        *(pytest.param("qwen3_5", each, marks=pytest.mark.slow) for each in ((1, 1, 1), (2, 1, 2))),
    ],
    ids=str,
)
def test_text_has_the_bits_that_it_has_without_images(tmp_path, name, shape):
    path, mesh, tokens = write(tmp_path, name), make_mesh(*shape), text()
    model = declare(CONFIGS[name])
    pool = np.full((model.tower.planes, 64, model.d_model), np.nan, np.float32)
    places = np.repeat(np.arange(len(tokens), dtype=np.int32)[:, None], 3, axis=1)
    with_pool = logits(mesh, path, tokens, images=Images(pool, places))
    assert np.array_equal(with_pool, logits(mesh, path, tokens))
