"""Logits of every family equal those of Hugging Face transformers."""

import numpy as np
import pytest

from spmd_tx.sharding.mesh import make_mesh
from tests.golden.families import CONFIGS, LOGITS, ROWS, tokens, write
from tests.support.family_logits import logits

pytestmark = pytest.mark.usefixtures("quickly_compiled")

TOLERANCE = 1e-5  # relative to the largest logit
# Other families have all their parts. Of qwen3_moe, test_parity.py has more.
ALIKE = ("mistral", "phi3", "qwen3_yarn", "qwen3_moe", "glm4_moe_lite", "qwen3_5")


@pytest.mark.parametrize(
    "name, shape",
    [pytest.param(name, (1, 1, 1), marks=[pytest.mark.slow] if name in ALIKE else []) for name in CONFIGS]
    + [pytest.param(name, (2, 2, 2), marks=pytest.mark.slow) for name in CONFIGS],
    ids=str,
)
def test_logits_equal_those_of_transformers(tmp_path, name, shape):
    expected = np.load(LOGITS)[f"{name}/logits"]
    actual = logits(make_mesh(*shape), write(tmp_path, name), tokens(name))[list(ROWS)]
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())
