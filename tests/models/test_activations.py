"""Gated activations are those of transformers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.models.activations import gated
from spmd_tx.models.layers import silu
from tests.golden.parts import GATED, PARTS

pytestmark = pytest.mark.usefixtures("quickly_compiled")

GOLDEN = np.load(PARTS)
run = jax.jit(gated, static_argnums=0)


def test_gate_and_up_are_clamped():
    assert np.abs(GATED).max() > 7
    found = run("clamped_swiglu", GATED[..., 0::2], GATED[..., 1::2])
    np.testing.assert_allclose(found, GOLDEN["activation/clamped_swiglu"], rtol=1e-5, atol=1e-6)


def test_gelu_is_the_one_by_tanh():
    found = run("gelu_tanh", GATED, np.ones_like(GATED))
    np.testing.assert_allclose(found, GOLDEN["activation/gelu_tanh"], rtol=1e-5, atol=1e-6)


def test_silu_is_the_one_of_dense_blocks():
    silus = jax.jit(lambda x: (gated("silu", x, x + 1), silu(x) * (x + 1)))
    assert np.array_equal(*silus(jnp.asarray(GATED)))
