"""Grouped and gated adapters are one function of a row, whatever stands beside it."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.models.adapters.grouped_lora import LEAST_ROWS, BankPlace, block_rows, grouped_lora
from spmd_tx.models.adapters.lora import Adapters, Lora, bank_lora, each_lora
from spmd_tx.sharding.mesh import AXES, make_mesh

pytestmark = pytest.mark.usefixtures("quickly_compiled")

RANK, WIDTH_IN, WIDTH_OUT = 4, 16, 24


def apply(make, slots, adapters, broken=None):
    """[B, O] of random rows, each with its own seed; ``broken`` is an adapter without a finite number."""
    x = np.stack([np.random.default_rng(row).normal(size=(1, WIDTH_IN)) for row in range(len(slots))])
    chance = np.random.default_rng(100)
    a, b = (chance.normal(size=(adapters, RANK, width)).astype(np.float32) for width in (WIDTH_IN, WIDTH_OUT))
    a[0] = b[0] = 0  # the base model
    # Up to 1: sums of about 8, whose terms cancel out where they are near 0.
    scale = np.arange(1, adapters + 1, dtype=np.float32) / adapters
    if broken is not None:
        b[broken] = np.nan

    return np.asarray(traced(make)(x.astype(np.float32), np.array(slots, np.int32), scale, a, b))[:, 0]


@cache
def traced(make):
    @jax.jit
    @partial(jax.shard_map, mesh=make_mesh(1, 1, 1), in_specs=jax.P(AXES), out_specs=jax.P(AXES))
    def run(x, slots, scale, a, b):
        if make is not grouped_lora:
            return make(slots, scale)(x, Lora(a, b))
        bank = Adapters({"q": Lora(*(jnp.stack([0 * f, f]) for f in (a, b)))}, Lora(a, b))
        in_layer = make(bank, slots, scale)(x, BankPlace(layer=jnp.int32(1), name="q"))
        in_head = make(bank, slots, scale)(x, BankPlace())
        return jnp.where(in_layer == in_head, in_layer, jnp.inf)

    return run


@pytest.mark.parametrize(
    "slots, adapters",
    [
        ([0], 4),
        ([3, 0, 3, 1], 4),
        ([2] * 16, 4),
        ([3] * (LEAST_ROWS + 1) + [0] * (LEAST_ROWS - 1) + [3] * LEAST_ROWS, 4),
        (np.random.default_rng(0).integers(0, 10, 64).tolist(), 10),
        (np.random.default_rng(0).integers(0, 8, 128).tolist(), 8),
        (np.random.default_rng(0).integers(0, 10, 128).tolist(), 10),
        ([9] * 128, 10),
    ],
)
def test_each_row_gets_its_own_adapter(slots, adapters):
    np.testing.assert_allclose(
        apply(grouped_lora, slots, adapters), apply(bank_lora, slots, adapters), rtol=1e-5, atol=1e-5
    )


def test_adapters_with_products_of_their_own_are_the_same_function():
    slots = [3, 0, 3, 1, 2, 2, 1, 3]
    expected = apply(bank_lora, slots, 4)
    np.testing.assert_allclose(apply(each_lora, slots, 4), expected, rtol=1e-5, atol=1e-5)
    y = apply(each_lora, slots, 4, broken=1)
    assert np.array_equal(np.isfinite(y).all(axis=1), np.array(slots) != 1)


def test_blocks_are_as_large_as_the_share_of_an_adapter_within_bounds():
    assert [block_rows(128, adapters) for adapters in (2, 8, 10, 32)] == [16, 16, 12, 8]
    assert block_rows(8, 8) == 8


def test_a_broken_adapter_is_seen_by_its_own_rows_only():
    slots = [1, 0, 1, 2, 0, 1] * 4
    y = apply(grouped_lora, slots, 3, broken=1)
    assert np.array_equal(np.isfinite(y).all(axis=1), np.array(slots) != 1)
