"""Ranks find what sorting finds."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from spmd_tx.models.experts.top_k import by_ranks, top_k

pytestmark = pytest.mark.usefixtures("quickly_compiled")


@pytest.mark.parametrize("width, count", [(1, 1), (8, 8), (128, 8), (300, 11)])
@pytest.mark.parametrize("distinct", [2, 1000], ids=["ties", "few ties"])
def test_ranks_and_sorting_agree(width, count, distinct):
    values = np.random.default_rng(width).integers(0, distinct, (3, 17, width)).astype(np.float32)
    values[0, 0, width // 2 :] = -np.inf
    best, places = by_ranks(jnp.asarray(values), count)
    expected, sorted_places = lax.top_k(jnp.asarray(values), count)
    assert np.array_equal(places, sorted_places)
    finite = np.isfinite(expected)
    assert np.array_equal(np.asarray(best)[finite], np.asarray(expected)[finite])


def test_what_is_no_number_comes_last():
    values = jnp.asarray([[jnp.nan, 1.0, jnp.nan, 3.0]])
    assert top_k(values, 3)[1].tolist() == [[3, 1, 0]]
