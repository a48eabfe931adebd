"""Base weights that are split over fsdp are the same weights: training comes out the same, in every bit."""

import numpy as np
import pytest

from tests.support.tiny_engine import (
    deal,
    mesh_name,
    named_factors,
    random_adapters,
    random_datum,
    tiny_engine,
)


@pytest.mark.parametrize(
    "shape, dtype, kind",
    [
        ((2, 1, 2), "bfloat16", "dense"),  # of which test_company.py has one
        pytest.param((2, 2, 2), "float32", "dense", marks=pytest.mark.slow),
        pytest.param((2, 2, 2), "float32", "mixture", marks=pytest.mark.slow),
        pytest.param((8, 1, 1), "float32", "dense", marks=pytest.mark.slow),
        pytest.param((8, 1, 1), "float32", "mixture", marks=pytest.mark.slow),
        pytest.param((2, 1, 2), "float32", "latent", marks=pytest.mark.slow),
        pytest.param((2, 1, 2), "float32", "linear", marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else mesh_name(value),
)
def test_training_does_not_depend_on_where_weights_lie(shape, dtype, kind):
    rows = [(random_datum(seed, seed % 3, 64 - seed),) for seed in range(8)]
    results = []
    for split_base in (False, True):
        engine = tiny_engine(shape, dtype, kind, split_base)
        w = random_adapters(1, engine.model)
        results.append(engine.forward_backward(w, deal(engine.data_shards, [rows])))
    replicated, split = results
    assert np.array_equal(replicated.logprobs, split.logprobs)
    assert np.array_equal(replicated.losses, split.losses)
    wanted = named_factors(replicated.grad_sum)
    for name, factor in named_factors(split.grad_sum).items():
        assert np.array_equal(factor, wanted[name]), name
