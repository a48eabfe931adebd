"""Gated activations are those of transformers."""

import jax.numpy as jnp
import numpy as np

from spmd_tx.models.activations import gated
from spmd_tx.models.layers import silu
from tests.golden.parts import GATED, PARTS

GOLDEN = np.load(PARTS)


def test_gate_and_up_are_clamped():
    gate, up = jnp.asarray(GATED[..., 0::2]), jnp.asarray(GATED[..., 1::2])
    assert np.abs(GATED).max() > 7
    found = gated("clamped_swiglu", gate, up)
    np.testing.assert_allclose(found, GOLDEN["activation/clamped_swiglu"], rtol=1e-5, atol=1e-6)


def test_gelu_is_the_one_by_tanh():
    x = jnp.asarray(GATED)
    found = gated("gelu_tanh", x, jnp.ones_like(x))
    np.testing.assert_allclose(found, GOLDEN["activation/gelu_tanh"], rtol=1e-5, atol=1e-6)


def test_silu_is_the_one_of_dense_blocks():
    x = jnp.asarray(GATED)
    assert np.array_equal(gated("silu", x, x + 1), silu(x) * (x + 1))
