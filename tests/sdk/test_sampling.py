"""Sampling through the real SDK: parameters, log-probabilities, versions, and many requests at once."""

import queue

import numpy as np
import pytest
from tinker import types
from tokenizers import Tokenizer

from spmd_tx.coordinator.agent.layout import TOKENIZER
from tests.sdk.examples import (
    CONTEXT,
    SECONDS,
    VOCABULARY,
    batch,
    drawn,
    greedy,
    logprobs_of,
    prompt,
    random_tokens,
    sample,
    supervised,
    train,
)

PROMPT = random_tokens(10, seed=0)
DATA = batch(seed=0)


@pytest.fixture
def trained(trainer):
    for _ in range(3):
        train(trainer, DATA)
    return trainer


@pytest.fixture(scope="session")
def tokenizer(model_dir):
    return Tokenizer.from_file(str(model_dir / TOKENIZER))


def test_sampled_logprobs_are_the_trainers(trained):
    sampler = trained.save_weights_and_get_sampling_client().result(SECONDS)
    answers = sampler.sample(prompt(PROMPT), 4, drawn(max_tokens=20)).result(SECONDS).sequences
    for answer in answers:
        expected = logprobs_of(trained, [supervised(PROMPT + answer.tokens)])[len(PROMPT) - 1 :]
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)
    assert len({tuple(answer.tokens) for answer in answers}) == 4


def test_prompt_logprobs_are_the_trainers(trained):
    sampler = trained.save_weights_and_get_sampling_client().result(SECONDS)
    expected = logprobs_of(trained, [supervised(PROMPT)])
    first, *others = sampler.compute_logprobs(prompt(PROMPT)).result(SECONDS)
    assert first is None
    np.testing.assert_allclose(others, expected, atol=1e-4)
    response = sampler.sample(prompt(PROMPT), 2, drawn(), include_prompt_logprobs=True).result(SECONDS)
    assert response.prompt_logprobs is not None
    np.testing.assert_allclose(response.prompt_logprobs[1:], expected, atol=1e-4)
    assert sampler.compute_logprobs(prompt(PROMPT[:1])).result(SECONDS) == [None]


def test_a_seed_gives_the_same_tokens_in_any_company(base_sampler):
    alone = sample(base_sampler, PROMPT, drawn(seed=2**40))
    company = [base_sampler.sample(prompt(PROMPT[:n]), 2, drawn(seed=n)) for n in range(1, 6)]
    again = base_sampler.sample(prompt(PROMPT), 3, drawn(seed=2**40)).result(SECONDS).sequences
    for future in company:
        future.result(SECONDS)
    assert again[0].tokens == alone.tokens
    np.testing.assert_allclose(again[0].logprobs, alone.logprobs, atol=1e-5)
    assert len({tuple(each.tokens) for each in again}) == 3
    assert sample(base_sampler, PROMPT, drawn(seed=2**40 + 1)).tokens != alone.tokens


def test_without_a_seed_no_two_requests_agree(base_sampler):
    params = types.SamplingParams(max_tokens=8, stop=[])
    assert sample(base_sampler, PROMPT, params).tokens != sample(base_sampler, PROMPT, params).tokens


def test_temperature_0_takes_the_likeliest_token(base_sampler, trainer):
    tokens = sample(base_sampler, PROMPT, greedy()).tokens
    assert sample(base_sampler, PROMPT, drawn(seed=5, temperature=0.0)).tokens == tokens
    assert sample(base_sampler, PROMPT, drawn(seed=5, top_k=1)).tokens == tokens
    assert sample(base_sampler, PROMPT, drawn(seed=5, top_p=1e-6)).tokens == tokens
    candidates = [supervised([*PROMPT, token]) for token in range(VOCABULARY)]
    last = logprobs_of(trainer, candidates).reshape(VOCABULARY, len(PROMPT))[:, -1]
    assert last.argmax() == tokens[0]
    assert np.exp(last).sum() == pytest.approx(1, abs=1e-4)


def test_a_low_temperature_sharpens_the_distribution_that_logprobs_are_of(base_sampler):
    cold = sample(base_sampler, PROMPT, drawn(max_tokens=16, temperature=0.1))
    assert np.mean(cold.logprobs) > np.mean(sample(base_sampler, PROMPT, drawn(max_tokens=16)).logprobs) + 1


def test_top_k_beyond_the_vocabulary_changes_nothing(base_sampler):
    expected = sample(base_sampler, PROMPT, drawn()).tokens
    assert sample(base_sampler, PROMPT, drawn(top_k=10**6)).tokens == expected


def test_a_stop_token_ends_the_sample_and_belongs_to_it(base_sampler):
    tokens = sample(base_sampler, PROMPT, drawn(max_tokens=12)).tokens
    stop = tokens[5]
    stopped = sample(base_sampler, PROMPT, drawn(max_tokens=12, stop=[stop, tokens[9]]))
    end = tokens.index(stop) + 1
    assert (stopped.tokens, stopped.stop_reason) == (tokens[:end], "stop")
    assert len(stopped.logprobs) == end


@pytest.mark.parametrize("as_list", [False, True], ids=["string", "list"])
def test_a_stop_string_ends_the_sample_with_the_token_that_completes_it(base_sampler, tokenizer, as_list):
    tokens = sample(base_sampler, PROMPT, drawn(max_tokens=16, seed=3)).tokens
    texts = [tokenizer.decode([token]) for token in tokens]
    place = next(n for n, text in enumerate(texts) if n > 2 and text.isascii() and len(text) > 1)
    stop = texts[place]
    end = next(n for n in range(1, 17) if stop in tokenizer.decode(tokens[:n]))
    params = drawn(max_tokens=16, seed=3, stop=[stop, "never said"] if as_list else stop)
    stopped = sample(base_sampler, PROMPT, params)
    assert (stopped.tokens, stopped.stop_reason) == (tokens[:end], "stop")


def test_the_end_of_text_stops_unless_all_stops_are_off(trainer, tokenizer):
    end = tokenizer.token_to_id("<|endoftext|>")
    for _ in range(8):
        train(trainer, [supervised([*PROMPT, end, end, end])], adam=types.AdamParams(learning_rate=0.05))
    sampler = trainer.save_weights_and_get_sampling_client().result(SECONDS)
    stopped = sample(sampler, PROMPT, types.SamplingParams(max_tokens=8, temperature=0.0))
    assert (stopped.tokens, stopped.stop_reason) == ([end], "stop")
    unstopped = sample(sampler, PROMPT, greedy())
    assert (unstopped.tokens[0], len(unstopped.tokens), unstopped.stop_reason) == (end, 8, "length")


def test_without_max_tokens_the_context_is_the_limit(base_sampler):
    params = types.SamplingParams(max_tokens=None, seed=1, stop=[])
    answer = sample(base_sampler, PROMPT, params)
    assert (len(PROMPT) + len(answer.tokens), answer.stop_reason) == (CONTEXT, "length")


def test_a_saved_version_stays_as_it_was_and_sampling_leaves_training_alone(trained):
    old = trained.save_weights_and_get_sampling_client().result(SECONDS)
    before = sample(old, PROMPT, greedy()), old.compute_logprobs(prompt(PROMPT)).result(SECONDS)
    for _ in range(3):
        train(trained, batch(seed=1))
    expected = logprobs_of(trained, DATA)
    after = sample(old, PROMPT, greedy()), old.compute_logprobs(prompt(PROMPT)).result(SECONDS)
    assert after[0].tokens == before[0].tokens
    assert after[0].logprobs == before[0].logprobs
    assert after[1] == before[1]
    np.testing.assert_array_equal(logprobs_of(trained, DATA), expected)
    new = trained.save_weights_and_get_sampling_client().result(SECONDS)
    assert new.compute_logprobs(prompt(PROMPT)).result(SECONDS) != before[1]


def test_many_versions_are_sampled_at_once(trainer):
    """More than fit on the device."""
    samplers = []
    for seed in range(10):
        train(trainer, batch(seed))
        samplers.append(trainer.save_weights_and_get_sampling_client().result(SECONDS))
    alone = [sample(sampler, PROMPT, drawn()) for sampler in samplers]
    futures = [sampler.sample(prompt(PROMPT), 1, drawn()) for sampler in samplers]
    for future, expected in zip(futures, alone, strict=True):
        (answer,) = future.result(SECONDS).sequences
        assert answer.tokens == expected.tokens
        np.testing.assert_allclose(answer.logprobs, expected.logprobs, atol=1e-5)
    assert len({tuple(each.logprobs) for each in alone}) == len(samplers)


def test_forty_samples_at_once_are_those_that_come_one_by_one(base_sampler):
    requests = [(PROMPT[: 1 + n % 10], drawn(max_tokens=1 + n, seed=n)) for n in range(40)]
    futures = [base_sampler.sample(prompt(tokens), 1, params) for tokens, params in requests]
    answers = [future.result(SECONDS).sequences[0] for future in futures]
    assert [len(answer.tokens) for answer in answers] == [1 + n for n in range(40)]
    for number in range(0, 40, 7):
        expected = sample(base_sampler, *requests[number])
        assert answers[number].tokens == expected.tokens
        np.testing.assert_allclose(answers[number].logprobs, expected.logprobs, atol=1e-5)


def test_a_short_sample_does_not_wait_for_a_long_one(base_sampler):
    finished = queue.SimpleQueue()
    for name, max_tokens in (("long", CONTEXT - len(PROMPT)), ("short", 4)):
        future = base_sampler.sample(prompt(PROMPT), 1, drawn(max_tokens=max_tokens))
        future.future().add_done_callback(lambda _, name=name: finished.put(name))
    assert [finished.get(timeout=SECONDS) for _ in range(2)] == ["short", "long"]


def test_a_request_of_more_samples_than_rows_is_answered_in_full(base_sampler):
    answers = base_sampler.sample(prompt(PROMPT), 20, drawn(max_tokens=3)).result(SECONDS).sequences
    assert len({tuple(answer.tokens) for answer in answers}) == 20
