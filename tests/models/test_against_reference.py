"""The training step against an independent implementation, on meshes of every kind."""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest

from tests.models.reference_results import (
    TOLERANCE,
    assert_close,
    ignored,
    near_the_sampler,
    random_parameters,
    reference_datum,
)
from tests.support import tiny_engine
from tests.support.tiny_engine import ENGINES, Datum, engine_name, named_factors, random_datum, slot_of

pytestmark = pytest.mark.usefixtures("quickly_compiled")

TRAINED = (0, 1, 2)  # slot 3 has no rows


@functools.cache
def mixed_rows(kind: str) -> list[tuple[Datum, ...]]:
    """Rows of three adapters and five losses: packed, padded and free."""
    rows = [
        (random_datum(1, 0, 40), random_datum(2, 0, 24)),
        (random_datum(3, 1, 64, "importance_sampling"),),
        (random_datum(4, 2, 24, "ppo"), random_datum(5, 2, 40, "ppo")),
        (),
        (random_datum(6, 0, 40, "cispo"),),
        (random_datum(7, 1, 24, "dro"), random_datum(8, 1, 24, "dro")),
        (random_datum(9, 2, 24, "cross_entropy"),),
        (random_datum(10, 1, 64, "ppo"),),
    ]
    near = [
        tuple(near_the_sampler(kind, datum, len(datum.tokens) + datum.slot) for datum in row) for row in rows
    ]
    limits = {"cispo": (0.75, 1.3), "ppo": (0.8, 1.2)}
    clipped = [tuple(replace(d, clip=limits.get(d.loss, d.clip), beta=0.3) for d in row) for row in near]
    return [tuple(ignored(datum, slice(5, 13)) for datum in row) for row in clipped]


@functools.cache
def expected(kind: str):
    """What reference_datum says of every datum, in order."""
    return [(datum, *reference_datum(kind, datum)) for row in mixed_rows(kind) for datum in row]


def cut(output: np.ndarray) -> list[np.ndarray]:
    """Each datum's part of an output [B, T], in order."""
    ends = [np.cumsum([len(datum.tokens) for datum in row]) for row in mixed_rows("dense")]
    return [part for line, end in zip(output, ends, strict=True) for part in np.split(line, end)[:-1]]


@pytest.fixture(
    scope="module",
    params=[pytest.param(each, marks=pytest.mark.slow) if "mixture" in each else each for each in ENGINES],
    ids=engine_name,
)
def engine(request):
    shape, kind, split_base = request.param
    return tiny_engine.tiny_engine(shape, kind=kind, split_base=split_base)


@pytest.fixture(scope="module")
def result(engine):
    return engine.forward_backward(random_parameters(engine.kind)[1], mixed_rows(engine.kind))


@pytest.mark.parametrize("loss", ["ppo", "cispo"])
@pytest.mark.parametrize("pays", [True, False])
def test_the_batch_has_tokens_below_inside_and_above_the_clip(loss, pays):
    sides = []
    for datum, _, logprobs, _ in expected("dense"):
        if datum.loss == loss:
            counts = (datum.advantages > 0) if pays else (datum.advantages < 0)
            ratios = np.exp(logprobs[counts] - datum.sampling_logprobs[counts])
            sides.extend(np.searchsorted(datum.clip, ratios))
    assert set(sides) == {0, 1, 2}


def test_logprobs_equal_the_reference(engine, result):
    for actual, (datum, _, logprobs, _) in zip(cut(result.logprobs), expected(engine.kind), strict=True):
        assert_close(actual, logprobs, f"logprobs of the {datum.loss} datum of slot {datum.slot}")


def test_losses_equal_the_reference(engine, result):
    for actual, (datum, losses, _, _) in zip(cut(result.losses), expected(engine.kind), strict=True):
        assert_close(actual, losses, f"{datum.loss} of slot {datum.slot}")


def test_gradients_equal_the_reference(engine, result):
    for slot in TRAINED:
        of_slot = [gradient for datum, _, _, gradient in expected(engine.kind) if datum.slot == slot]
        total = named_factors(jax.tree.map(lambda *parts: np.sum(parts, axis=0), *of_slot))
        for name, actual in named_factors(slot_of(result.grad_sum, slot)).items():
            assert_close(actual, total[name], f"slot {slot} {name}")


def test_a_slot_without_rows_gets_no_gradient(result):
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(slot_of(result.grad_sum, 3)))


def test_positions_that_do_not_count_add_exactly_nothing(result):
    for losses in cut(result.losses):
        assert np.array_equal(losses[5:13], np.zeros(8))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(result.grad_sum))


def test_forward_equals_forward_backward(engine, result):
    logprobs, losses = engine.forward(random_parameters(engine.kind)[1], mixed_rows(engine.kind))
    np.testing.assert_allclose(logprobs, result.logprobs, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(losses, result.losses, rtol=TOLERANCE, atol=TOLERANCE)
