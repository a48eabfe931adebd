"""What is told of a prompt beside its log-probabilities, and the likeliest tokens of a sample."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from spmd_tx.worker.steps.prompt_scores import ScoreInputs, Widths
from tests.models import reference
from tests.support.tiny_engine import BOTH_SCALES, LENGTH, MODEL, mesh_name, slot_of, tiny_engine
from tests.support.tiny_sampler import Sample, go_on, random_prompt, run, sampler_weights, stand, tiny_sampler

pytestmark = pytest.mark.usefixtures("quickly_compiled")

TOLERANCE = 1e-5  # nats
PROMPT = Sample(random_prompt(1, 13), slot=1, seed=(7, 9))
OTHER = Sample(random_prompt(3, 24), slot=0, seed=(7, 9))
TOP, DRAWS = 4, 8

TARGETS = np.full((12, 2), -1, np.int32)
TARGETS[:, 0] = PROMPT.prompt[1:]
TARGETS[3, 1], TARGETS[4, 1] = 255, 0


@pytest.fixture(
    scope="module", params=[pytest.param((1, 1, 1), marks=pytest.mark.slow), (2, 1, 4)], ids=mesh_name
)
def sampler(request):
    return tiny_sampler(request.param).reset()


def reference_logprobs(sample, temperature=1.0, extra=()):
    """float64 [tokens, V], of what follows each."""
    sequence = np.concatenate([sample.prompt, extra]).astype(np.int32)
    tokens = np.pad(sequence, (0, LENGTH - len(sequence)))
    adapter = slot_of(sampler_weights(), sample.slot)
    logits = reference_logits(tiny_engine().base, adapter, BOTH_SCALES[sample.slot], tokens)
    logits = np.asarray(logits)[: len(sequence)].astype(np.float64) / temperature
    return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


@jax.jit
def reference_logits(base, adapter, scales, tokens):
    return reference.logits(MODEL, base, adapter, scales, tokens)


def scores_of(sampler, samples, seed=(1, 2), temperature=1.0):
    places = stand(samples, shards=sampler.data_shards)
    shape = sampler.prefill_shape
    inputs = ScoreInputs(
        np.full((*shape, 2), -1, np.int32),
        np.broadcast_to(np.array(seed, np.uint32), (*shape, 2)),
        np.full(shape, temperature, np.float32),
    )
    row, place = sampler.prefill_places(places)[0]
    inputs.targets[row, place] = TARGETS
    return sampler.scored_prefill(places, Widths(TOP, DRAWS), inputs)[0]


def test_scores_are_those_of_the_reference(sampler):
    scores, expected = scores_of(sampler, [PROMPT]), reference_logprobs(PROMPT)[:-1]
    rows = np.arange(len(expected))
    np.testing.assert_allclose(scores["logprobs"], expected[rows, PROMPT.prompt[1:]], atol=TOLERANCE)
    best = np.argsort(-expected, axis=-1, kind="stable")[:, :TOP]
    np.testing.assert_array_equal(scores["top_tokens"], best)
    np.testing.assert_allclose(scores["top_logprobs"], np.take_along_axis(expected, best, 1), atol=TOLERANCE)
    np.testing.assert_array_equal(scores["target_logprobs"][:, 0], scores["logprobs"])
    named = scores["target_logprobs"][:, 1]
    np.testing.assert_allclose(named[[3, 4]], expected[[3, 4], [255, 0]], atol=TOLERANCE)
    assert not named[[0, 1, 2, *range(5, 12)]].any()
    drawn = np.take_along_axis(expected, scores["drawn_tokens"], 1)
    np.testing.assert_allclose(scores["drawn_logprobs"], drawn, atol=TOLERANCE)


def test_draws_follow_from_the_seed_on_every_mesh_and_in_any_company(sampler):
    alone = scores_of(tiny_sampler().reset(), [PROMPT])["drawn_tokens"]
    np.testing.assert_array_equal(scores_of(sampler, [PROMPT, OTHER])["drawn_tokens"], alone)
    assert (scores_of(sampler, [PROMPT], seed=(1, 3))["drawn_tokens"] != alone).any()
    assert all(len(set(row)) > 1 for row in alone.tolist())


def test_draws_at_temperature_0_are_the_likeliest_token(sampler):
    scores = scores_of(sampler, [PROMPT], temperature=0.0)
    np.testing.assert_array_equal(scores["drawn_tokens"], np.repeat(scores["top_tokens"][:, :1], DRAWS, 1))


@pytest.mark.parametrize("temperature", [pytest.param(1.0, marks=pytest.mark.slow), 0.5, 0.0])
def test_the_likeliest_tokens_of_a_sample_are_of_the_distribution_it_is_drawn_from(sampler, temperature):
    sample = replace(PROMPT, temperature=temperature)
    places = stand([sample, OTHER], shards=sampler.data_shards)
    plain = run(sampler, places)[0]
    sampler.prefill(places)
    drawn = sampler.decode_top(places, TOP)[0] + sampler.decode_top(go_on(places), TOP)[0]
    np.testing.assert_array_equal(drawn.tokens, plain.tokens)
    np.testing.assert_allclose(drawn.logprobs, plain.logprobs, atol=TOLERANCE)
    expected = reference_logprobs(sample, temperature or 1.0, drawn.tokens)[len(sample.prompt) - 1 : -1]
    best = np.argsort(-expected, axis=-1, kind="stable")[:, :TOP]
    np.testing.assert_array_equal(drawn.top_tokens, best)
    np.testing.assert_allclose(drawn.top_logprobs, np.take_along_axis(expected, best, 1), atol=TOLERANCE)
    steps, ranks = np.nonzero(drawn.top_tokens == drawn.tokens[:, None])
    np.testing.assert_array_equal(drawn.top_logprobs[steps, ranks], drawn.logprobs[steps])
    assert steps.size
