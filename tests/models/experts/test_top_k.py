"""Ranks find what sorting finds."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from spmd_tx.models.experts.top_k import by_ranks, top_k

pytestmark = pytest.mark.usefixtures("quickly_compiled")


@partial(jax.jit, static_argnums=1)
def both(values, count):
    return *by_ranks(values, count), *lax.top_k(values, count)


@pytest.mark.parametrize("width, count", [(1, 1), (8, 8), (128, 8), (300, 11)])
@pytest.mark.parametrize("distinct", [2, 1000], ids=["ties", "few ties"])
def test_ranks_and_sorting_agree(width, count, distinct):
    values = np.random.default_rng(width).integers(0, distinct, (3, 17, width)).astype(np.float32)
    values[0, 0, width // 2 :] = -np.inf
    best, places, expected, sorted_places = map(np.asarray, both(values, count))
    assert np.array_equal(places, sorted_places)
    finite = np.isfinite(expected)
    assert np.array_equal(best[finite], expected[finite])


def test_what_is_no_number_comes_last():
    values = jnp.asarray([[jnp.nan, 1.0, jnp.nan, 3.0]])
    assert top_k(values, 3)[1].tolist() == [[3, 1, 0]]
