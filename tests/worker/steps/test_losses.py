"""Every loss of single tokens beside the same formula in plain words, without a model."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.protocol.commands import LOSS_NAMES
from spmd_tx.worker.steps.losses import LOSSES, TokenLossInputs, token_losses
from tests.models import reference

TOKENS = 64
SEQUENCES = {"gspo"}  # tests/models/test_losses_against_reference.py compares them


def random_inputs() -> SimpleNamespace:
    """Of one row, whose ratios are within the thresholds and beyond them, and each advantage is a number."""
    random = np.random.default_rng(0)
    sampled = random.normal(-2, 0.5, TOKENS).astype(np.float32)
    weights, advantages = random.normal(size=(2, TOKENS)).astype(np.float32)
    return SimpleNamespace(
        logprobs=sampled + random.normal(0, 0.7, TOKENS).astype(np.float32),
        sampling_logprobs=sampled,
        weights=weights,
        advantages=advantages,
        clip=(np.float32(0.8), np.float32(1.3)),
        beta=np.float32(0.3),
        kl_coeff=np.float32(0.2),
    )


def test_every_loss_has_a_formula_and_a_reference():
    assert LOSSES.keys() | SEQUENCES == set(LOSS_NAMES), "spmd_tx/worker/steps/losses.py: add the formula"
    assert LOSSES.keys() == reference.LOSSES.keys(), "tests/models/reference.py: add the formula to LOSSES"


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_gradient_equal_the_reference(name):
    row = random_inputs()
    low, high = (np.full((1, TOKENS), bound) for bound in row.clip)
    inputs = TokenLossInputs(
        kinds=np.full((1, 1), LOSS_NAMES.index(name), np.int32),
        clip_low=low,
        clip_high=high,
        beta=np.full((1, 1), row.beta),
        kl_coeff=np.full((1, 1), row.kl_coeff),
        weights=row.weights[None],
        advantages=row.advantages[None],
        sampling_logprobs=row.sampling_logprobs[None],
    )
    found = values_and_gradient(lambda logprobs: token_losses(logprobs[None], inputs)[0], row.logprobs)
    wanted = values_and_gradient(lambda logprobs: reference.LOSSES[name](logprobs, row), row.logprobs)
    for actual, expected in zip(found, wanted, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def values_and_gradient(loss, logprobs):
    @jax.jit
    def both(logprobs):
        values, pull_back = jax.vjp(loss, logprobs)
        return values, pull_back(jnp.ones_like(values))[0]

    return both(logprobs)
