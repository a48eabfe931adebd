"""The layer that makes drafts computes what the DeepSeek-V3 report says, on every mesh."""

import numpy as np
import pytest

from spmd_tx.sharding.mesh import make_mesh
from tests.golden.families import LENGTH, tokens
from tests.support.family_logits import logits
from tests.support.mtp_models import FAMILIES, expected_logits, write_with_mtp
from tests.support.tiny_engine import mesh_name

CLOSE = 1e-4


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)], ids=mesh_name)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_report(family, shape, tmp_path):
    path, text = write_with_mtp(tmp_path, family), tokens(family)
    expected = expected_logits(path, text)
    found = logits(make_mesh(*shape), path, text, speculation="mtp")[: LENGTH - 1]
    np.testing.assert_allclose(found, expected, rtol=0, atol=CLOSE)
