"""Every loss is a sum over tokens, so how a request is cut into batches does not matter."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from tests.support.tiny_engine import deal, named_factors, random_adapters, random_datum, slot_of, tiny_engine

pytestmark = pytest.mark.usefixtures("quickly_compiled")

SLOT = 2
TOLERANCE = 2e-6  # relative to the largest entry of a factor's gradient


@pytest.fixture(scope="module")
def engine():
    return tiny_engine()


@pytest.fixture(scope="module")
def w():
    return random_adapters(seed=1)


def datums(count: int):
    losses = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")
    return [random_datum(seed, SLOT, (24, 40)[seed % 2], losses[seed % 5]) for seed in range(count)]


def gradient(engine, w, rows, grad_sum=None):
    return engine.forward_backward(w, rows, grad_sum).grad_sum


def assert_close(actual, expected, tolerance=TOLERANCE):
    expected = named_factors(expected)
    for name, leaf in named_factors(actual).items():
        np.testing.assert_allclose(
            leaf, expected[name], rtol=0, atol=tolerance * np.abs(expected[name]).max(), err_msg=name
        )


def test_one_batch_equals_its_datums_one_by_one(engine, w):
    together = engine.forward_backward(w, [(datum,) for datum in datums(6)])
    grad_sum = None
    for index, datum in enumerate(datums(6)):
        one = engine.forward_backward(w, [(datum,)], grad_sum)
        np.testing.assert_allclose(one.losses[0], together.losses[index], rtol=1e-5, atol=1e-6)
        grad_sum = one.grad_sum
    assert_close(grad_sum, together.grad_sum)


def test_a_packed_row_equals_its_datums_in_rows_of_their_own(engine, w):
    first, second = random_datum(1, SLOT, 40), random_datum(2, SLOT, 24)
    assert_close(gradient(engine, w, [(first, second)]), gradient(engine, w, [(first,), (second,)]))


@pytest.mark.parametrize("factor", [2.0, -0.5])
def test_the_gradient_is_linear_in_the_weights(engine, w, factor):
    rows = [(random_datum(1, SLOT),), (random_datum(2, SLOT, 40),)]
    scaled = [tuple(datum.times(factor) for datum in row) for row in rows]
    expected = jax.tree.map(lambda leaf: leaf * np.float32(factor), gradient(engine, w, rows))
    # Powers of two only move the exponent, so nothing at all may change.
    assert_close(gradient(engine, w, scaled), expected, tolerance=0)


def test_weights_that_sum_to_zero_are_not_normalised(engine, w):
    datum = random_datum(1, SLOT)
    balanced = replace(datum, weights=datum.weights - datum.weights.mean())
    parts = [
        replace(balanced, weights=np.where(sign * balanced.weights > 0, balanced.weights, 0))
        for sign in (1, -1)
    ]
    summed = gradient(engine, w, [(parts[1],)], gradient(engine, w, [(parts[0],)]))
    assert_close(gradient(engine, w, [(balanced,)]), summed, tolerance=1e-5)


def test_the_same_datum_twice_counts_twice(engine, w):
    datum = random_datum(1, SLOT)
    once = gradient(engine, w, [(datum,)])
    twice = jax.tree.map(lambda leaf: 2 * leaf, once)
    assert_close(gradient(engine, w, [(datum,), (datum,)]), twice, tolerance=0)
    assert_close(gradient(engine, w, [(datum,)], once), twice, tolerance=0)


def test_gradients_are_added_to_what_is_there_and_only_to_the_slots_with_rows(engine, w):
    before = random_adapters(seed=7)
    after = gradient(engine, w, [(random_datum(1, SLOT),)], before)
    added = gradient(engine, w, [(random_datum(1, SLOT),)])
    assert_close(after, jax.tree.map(np.add, before, added), tolerance=0)
    for slot in {0, 1, 2, 3} - {SLOT}:
        assert_close(slot_of(after, slot), slot_of(before, slot), tolerance=0)


def test_a_batch_of_free_rows_changes_nothing(engine, w):
    before = random_adapters(seed=7)
    assert_close(gradient(engine, w, [], before), before, tolerance=0)


def test_rows_on_other_data_shards_count_as_much():
    w, rows = random_adapters(seed=1), [(datum,) for datum in datums(5)]
    one, four = tiny_engine((1, 1, 1)), tiny_engine((2, 2, 2))
    expected = gradient(one, w, deal(one.data_shards, [rows]))
    assert_close(gradient(four, w, deal(four.data_shards, [rows])), expected, tolerance=1e-5)
