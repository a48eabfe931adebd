"""The likeliest tokens of a vocabulary that is split, and draws from it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.models import head, sampling
from spmd_tx.sharding.mesh import TP, make_mesh

pytestmark = pytest.mark.usefixtures("quickly_compiled")


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_equally_likely_tokens_come_in_the_order_of_their_ids(tp):
    """Also with more of them wanted than one device has."""
    counts = 1, 3, 5, 16
    logits = np.array([[0, 2, 1, 2, 2, 0, 1, 2, 0, 0, 2, 1, 1, 1, 2, 0]], np.float32)
    top = jax.jit(
        partial(jax.shard_map, mesh=make_mesh(1, 1, tp), in_specs=jax.P(None, TP), out_specs=jax.P())(
            lambda logits: [head.top_logits(logits, count) for count in counts]
        )
    )
    for count, (tokens, highest) in zip(counts, top(logits), strict=True):
        expected = np.argsort(-logits, axis=-1, kind="stable")[:, :count]
        np.testing.assert_array_equal(tokens, expected)
        np.testing.assert_array_equal(highest, np.take_along_axis(logits, expected, 1))


@pytest.mark.parametrize("tp", [1, 4])
def test_several_draws_have_the_frequencies_of_the_tempered_distribution(tp):
    count, logits = 2_000, np.random.default_rng(1).normal(size=(2, 1024)).astype(np.float32)
    logits[:, [3, 300, 301, 900]] += [8, 9, 7, 8]
    draw = jax.jit(
        partial(
            jax.shard_map, mesh=make_mesh(1, 1, tp), in_specs=(jax.P(None, TP), jax.P()), out_specs=jax.P()
        )(
            lambda logits, temperatures: sampling.draw_several(
                logits,
                jnp.array([[1, 2], [3, 4]], jnp.uint32),
                jnp.array([5, 6]),
                temperatures,
                count,
            )
        )
    )
    for temperature in (1.0, 0.4):
        mass = np.exp(logits / temperature)
        tokens = np.asarray(draw(logits, np.full(2, temperature, np.float32)))
        for drawn, expected in zip(tokens, mass / mass.sum(axis=-1, keepdims=True), strict=True):
            assert np.abs(np.bincount(drawn, minlength=1024) / count - expected).max() < 0.03


@pytest.mark.parametrize("tp", [1, 2])
def test_gradients_of_several_targets_are_those_of_the_formula_though_some_are_named_twice(tp):
    random = np.random.default_rng(2)
    logits, slopes = (random.normal(size=shape).astype(np.float32) for shape in ((2, 3, 16), (2, 3, 5)))
    targets = random.integers(0, 16, (2, 3, 5)).astype(np.int32)
    targets[:, :, 3] = targets[:, :, 0]
    split, rows = jax.P(None, None, TP), jax.P()

    @jax.jit
    @partial(jax.shard_map, mesh=make_mesh(1, 1, tp), in_specs=(split, rows, rows), out_specs=split)
    def gradient(logits, targets, slopes):
        _, pull_back = jax.vjp(lambda logits: head.target_logprobs(logits, targets), logits)
        return pull_back(slopes)[0]

    def weighted(logits):
        logprobs = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.take_along_axis(logprobs, targets, axis=-1) * slopes)

    np.testing.assert_allclose(
        gradient(logits, targets, slopes), jax.jit(jax.grad(weighted))(logits), rtol=0, atol=1e-6
    )
    assert "scatter-add" not in str(jax.make_jaxpr(gradient)(logits, targets, slopes))
