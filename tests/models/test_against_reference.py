"""The training step against an independent implementation, on meshes of every kind."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import tiny_engine
from tests.models import reference
from tests.tiny_engine import (
    BOTH_SCALES,
    ENGINES,
    LENGTH,
    MODELS,
    Datum,
    engine_name,
    named_factors,
    random_datum,
    slot_of,
)

TOLERANCE = 1e-5  # relative to the largest entry of the array
TRAINED = (0, 1, 2)  # slot 3 has no rows
LOWEST_RATIO, HIGHEST_RATIO = 0.7, 1.6


@functools.cache
def random_parameters(kind: str):
    base = tiny_engine.random_arrays(tiny_engine.tiny_engine(kind=kind).declared_base, seed=0)
    return jax.tree.map(jnp.asarray, base), tiny_engine.random_adapters(1, MODELS[kind])


@functools.partial(jax.jit, static_argnums=0)
def reference_logprobs(kind, adapter, base, scales, tokens, targets):
    return reference.logprobs(MODELS[kind], base, adapter, scales, tokens, targets)


@functools.partial(jax.jit, static_argnums=0)
def reference_gradient(kind, adapter, *others_and_cotangent):
    """Gradient of the sum of cotangent · logprob."""
    *others, cotangent = others_and_cotangent
    return jax.grad(lambda a: jnp.sum(cotangent * reference_logprobs(kind, a, *others)))(adapter)


def to_the_end(values: np.ndarray) -> np.ndarray:
    """Filled up with zeros to LENGTH, to compile once: what follows a token does not matter to it."""
    return np.pad(values, (0, LENGTH - len(values)))


def arguments(kind: str, datum: Datum):
    base, adapters = random_parameters(kind)
    tokens, targets = to_the_end(datum.tokens), to_the_end(datum.targets)
    return kind, slot_of(adapters, datum.slot), base, BOTH_SCALES[datum.slot], tokens, targets


def logprobs_of(kind: str, datum: Datum) -> np.ndarray:
    return np.asarray(reference_logprobs(*arguments(kind, datum)))[: len(datum.tokens)]


def near_the_sampler(kind: str, datum: Datum, seed: int) -> Datum:
    """The datum as if sampled from a slightly different policy: ratios fall on both sides of the clips."""
    logprobs = logprobs_of(kind, datum)
    log_ratios = np.random.default_rng(seed).uniform(
        np.log(LOWEST_RATIO), np.log(HIGHEST_RATIO), logprobs.shape
    )
    return replace(datum, sampling_logprobs=(logprobs - log_ratios).astype(np.float32))


def ignored(datum: Datum, positions: slice) -> Datum:
    """The datum with positions that do not count, and nonsense where their inputs would be."""
    weights, advantages, logprobs = (
        datum.weights.copy(),
        datum.advantages.copy(),
        datum.sampling_logprobs.copy(),
    )
    weights[positions] = advantages[positions] = 0.0
    logprobs[positions] = np.resize(
        np.array([-np.inf, np.nan, np.inf, 1e38, -1e38], np.float32), logprobs[positions].shape
    )
    return replace(datum, weights=weights, advantages=advantages, sampling_logprobs=logprobs)


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


def reference_datum(kind: str, datum: Datum):
    """(losses, logprobs, gradient); positions that do not count are left out, not masked."""
    counts = (datum.weights if datum.loss == "cross_entropy" else datum.advantages) != 0
    inputs = {name: getattr(datum, name)[counts] for name in ("weights", "advantages", "sampling_logprobs")}
    loss = functools.partial(reference.LOSSES[datum.loss], datum=replace(datum, **inputs))
    logprobs = logprobs_of(kind, datum)
    losses, cotangent = np.zeros((2, *counts.shape), np.float32)
    losses[counts] = loss(logprobs[counts])
    cotangent[counts] = jax.grad(lambda x: jnp.sum(loss(x)))(logprobs[counts])
    return losses, logprobs, reference_gradient(*arguments(kind, datum), to_the_end(cotangent))


@functools.cache
def expected(kind: str):
    """What reference_datum says of every datum, in order."""
    return [(datum, *reference_datum(kind, datum)) for row in mixed_rows(kind) for datum in row]


def cut(output: np.ndarray) -> list[np.ndarray]:
    """Each datum's part of an output [B, T], in order."""
    ends = [np.cumsum([len(datum.tokens) for datum in row]) for row in mixed_rows("dense")]
    return [part for line, end in zip(output, ends, strict=True) for part in np.split(line, end)[:-1]]


def assert_close(actual: np.ndarray, wanted: np.ndarray, what: str) -> None:
    scale = np.abs(wanted).max()
    assert scale > 0, f"{what}: the reference is zero, so the test says nothing"
    assert np.abs(actual - wanted).max() <= TOLERANCE * scale, what


@pytest.fixture(scope="module", params=ENGINES, ids=engine_name)
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
