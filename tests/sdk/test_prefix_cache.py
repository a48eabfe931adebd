"""Prompts that begin like others, through the real SDK: read once, and answered the same."""

import numpy as np
import pytest

from tests.sdk.examples import SECONDS, drawn, prompt, random_tokens
from tests.sdk.server import BASE_MODEL

PAGE = 16  # tokens
STEM = random_tokens(100, seed=3)
EVERYTHING = {"prompt_alt_tokens_k": 1}  # is to be read


@pytest.fixture
def cold_sampler(other_service):
    """Of another session, which finds nothing of what the first one has left."""
    return other_service.create_sampling_client(base_model=BASE_MODEL).result(SECONDS)


def ask(sampler, tokens, **options):
    params = drawn(max_tokens=24, seed=options.pop("seed", 1))
    return sampler.sample(prompt(tokens), options.pop("num_samples", 1), params, **options).result(SECONDS)


def test_a_conversation_is_read_once_and_answered_as_if_it_were_read_every_time(base_sampler, cold_sampler):
    tokens, hits = STEM[:40], []
    for turn in range(3):
        answer = ask(base_sampler, tokens, seed=turn)
        hits.append(answer.prompt_cache_hit_tokens)
        expected = ask(cold_sampler, tokens, seed=turn, prompt_alt_tokens_k=1)  # which reads all of it
        assert expected.prompt_cache_hit_tokens == 0
        assert answer.sequences[0].tokens == expected.sequences[0].tokens
        np.testing.assert_allclose(
            answer.sequences[0].logprobs, expected.sequences[0].logprobs, rtol=0, atol=1e-5
        )
        tokens = [*tokens, *answer.sequences[0].tokens, *random_tokens(9, turn)]
    assert hits[0] == 0
    assert hits[1] >= 40 // PAGE * PAGE
    assert hits[2] >= (40 + 24 + 9) // PAGE * PAGE


def test_a_session_finds_nothing_that_another_one_has_left(base_sampler, cold_sampler):
    first, again = (ask(base_sampler, STEM, num_samples=2) for _ in range(2))
    assert (first.prompt_cache_hit_tokens, again.prompt_cache_hit_tokens) == (0, 99 // PAGE * PAGE)
    cold = ask(cold_sampler, STEM, num_samples=2)
    assert cold.prompt_cache_hit_tokens == 0
    for one, other in zip(again.sequences, cold.sequences, strict=True):
        assert one.tokens == other.tokens


def test_the_likelihood_of_several_endings_reads_their_common_beginning_once(base_sampler, cold_sampler):
    for number in range(3):
        tokens = [*STEM, *random_tokens(7, number)]
        options = {"include_prompt_logprobs": True, "prompt_logprobs_last_n": 7, "topk_prompt_logprobs": 2}
        some, whole = ask(base_sampler, tokens, **options), ask(cold_sampler, tokens, **options, **EVERYTHING)
        assert some.prompt_cache_hit_tokens == (99 // PAGE * PAGE if number else 0)
        np.testing.assert_allclose(some.prompt_logprobs[-7:], whole.prompt_logprobs[-7:], rtol=0, atol=1e-5)
        assert some.prompt_logprobs[:-7] == [None] * 100
        assert [[token for token, _ in row] for row in some.topk_prompt_logprobs[-7:]] == [
            [token for token, _ in row] for row in whole.topk_prompt_logprobs[-7:]
        ]


def test_a_prompt_that_is_scored_in_full_is_read_in_full(base_sampler):
    ask(base_sampler, STEM)
    assert ask(base_sampler, STEM, include_prompt_logprobs=True).prompt_cache_hit_tokens == 0
    assert ask(base_sampler, STEM, prompt_alt_tokens_k=1).prompt_cache_hit_tokens == 0
