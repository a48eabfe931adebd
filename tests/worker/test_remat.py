"""What is computed twice changes memory, and neither losses nor gradients; and how much is chosen."""

from dataclasses import replace

import numpy as np
import pytest

from spmd_tx.worker import remat
from tests.tiny_engine import (
    LENGTH,
    MODEL,
    ROWS,
    named_factors,
    random_adapters,
    random_datum,
    tiny_engine,
)

TOLERANCE = 2e-6  # relative to the largest entry of a factor's gradient
TINY = replace(MODEL, n_layers=4, d_model=256, d_ff=768, n_heads=4, n_kv_heads=2, head_dim=64)
MIB = 2**20


def rows():
    losses = ("cross_entropy", "ppo", "importance_sampling")
    return [(random_datum(seed, seed % 3, LENGTH, losses[seed % 3]),) for seed in range(ROWS)]


@pytest.mark.parametrize(
    "shape, kind, level",
    [((1, 1, 1), "dense", "none"), ((1, 1, 1), "dense", "mlp"), ((2, 2, 2), "mixture", "mlp")],
)
def test_every_level_leads_to_the_same_gradients(shape, kind, level):
    engine = tiny_engine(shape, kind=kind, remat=level)
    w = random_adapters(1, engine.model)
    expected = tiny_engine(shape, kind=kind).forward_backward(w, rows())
    actual = engine.forward_backward(w, rows())
    np.testing.assert_allclose(actual.logprobs, expected.logprobs, rtol=0, atol=1e-5)
    factors = named_factors(actual.grad_sum)
    for name, leaf in named_factors(expected.grad_sum).items():
        np.testing.assert_allclose(factors[name], leaf, rtol=0, atol=TOLERANCE * np.abs(leaf).max())


def test_a_higher_level_keeps_less():
    none, mlp, full = (tiny_engine(remat=level).temporary_bytes(rows()) for level in ("none", "mlp", "full"))
    assert none > mlp > full


def test_the_estimate_is_of_the_right_size():
    temporary = {level: tiny_engine(remat=level).temporary_bytes(rows()) for level in ("none", "full")}
    kept = {level: remat.kept_bytes(MODEL, level, ROWS, LENGTH, 1, 4) for level in temporary}
    ratio = (kept["none"] - kept["full"]) / (temporary["none"] - temporary["full"])
    assert 0.5 < ratio < 2


@pytest.mark.parametrize(
    "budget, tp, level",
    [
        (4096, 1, "none"),
        (512, 1, "mlp"),
        (170, 1, "mlp"),
        (150, 1, "full"),
        (0, 1, "full"),
        (2048, 2, "none"),
    ],
)
def test_the_level_that_fits_is_chosen(budget, tp, level):
    assert remat.choose(TINY, 8192, tp, 4, budget * MIB) == level
