"""What the real SDK is told beside tokens and their log-probabilities."""

import numpy as np
import pytest
import tinker
from tinker import types

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

PROMPT = random_tokens(12, seed=0)
LENGTH = len(PROMPT)
TOLD = 4  # tokens per position, mostly: each number is another program


@pytest.fixture
def trained(trainer):
    train(trainer, batch(seed=0))
    return trainer


@pytest.fixture
def sampler(trained):
    return trained.save_weights_and_get_sampling_client().result(SECONDS)


def all_logprobs(trainer, position):
    """What the trainer says of every token that could stand there."""
    candidates = [supervised([*PROMPT[:position], token]) for token in range(VOCABULARY)]
    return logprobs_of(trainer, candidates).reshape(VOCABULARY, position)[:, -1]


def ask(sampler, tokens=PROMPT, params=None, num_samples=1, **wishes):
    params = drawn(max_tokens=4) if params is None else params
    return sampler.sample(prompt(tokens), num_samples, params, **wishes).result(SECONDS)


def test_the_likeliest_tokens_of_a_prompt_are_the_trainers(trained, sampler):
    response = ask(sampler, include_prompt_logprobs=True, topk_prompt_logprobs=TOLD)
    top = response.topk_prompt_logprobs
    assert top[0] is None
    assert [len(row) for row in top[1:]] == [TOLD] * (LENGTH - 1)
    for position in (1, LENGTH - 1):
        expected = all_logprobs(trained, position)
        best = np.argsort(-expected, kind="stable")[:TOLD]
        assert [token for token, _ in top[position]] == best.tolist()
        np.testing.assert_allclose([each for _, each in top[position]], expected[best], atol=1e-4)
    for token, logprob, row in zip(PROMPT[1:], response.prompt_logprobs[1:], top[1:], strict=True):
        assert dict(row).get(token, logprob) == pytest.approx(logprob, abs=1e-6)


def test_the_likeliest_tokens_of_a_sample_are_of_what_it_was_drawn_from(sampler):
    for params in (greedy(max_tokens=6), drawn(max_tokens=6, temperature=0.3, seed=4)):
        plain = sample(sampler, PROMPT, params)
        (answer,) = ask(sampler, params=params, topk_sample_logprobs=3).sequences
        assert answer.tokens == plain.tokens
        np.testing.assert_allclose(answer.logprobs, plain.logprobs, atol=1e-5)
        assert [len(row) for row in answer.topk_logprobs] == [3] * 6
        for token, logprob, row in zip(answer.tokens, answer.logprobs, answer.topk_logprobs, strict=True):
            assert row == sorted(row, key=lambda cell: -cell[1])
            assert dict(row).get(token, logprob) == logprob
    assert ask(sampler).sequences[0].topk_logprobs is None


def test_each_sample_has_its_own_likeliest_tokens_up_to_its_end(sampler):
    stop = sample(sampler, PROMPT, drawn(max_tokens=8, seed=3)).tokens[2]
    params = drawn(max_tokens=8, seed=3, stop=[stop])
    for answer in ask(sampler, params=params, num_samples=3, topk_sample_logprobs=3).sequences:
        assert len(answer.topk_logprobs) == len(answer.tokens)


def tensor_of(ids, is_sparse):
    """Of an array [L - 1, K] in which -1 names nothing."""
    if not is_sparse:
        return types.TensorData(ids.ravel().tolist(), "int64", list(ids.shape))
    rows, columns = np.nonzero(ids >= 0)
    starts = np.searchsorted(rows, np.arange(len(ids) + 1))
    return types.TensorData(
        ids[rows, columns].tolist(), "int64", list(ids.shape), starts.tolist(), columns.tolist()
    )


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
def test_named_tokens_get_the_trainers_logprobs_in_the_layout_of_the_request(trained, sampler, is_sparse):
    ids = np.full((LENGTH - 1, 3), -1)
    ids[:, 1] = PROMPT[1:]
    ids[4] = [7, 0, VOCABULARY - 1]
    ids[6] = -1
    tensor = tensor_of(ids, is_sparse)
    response = ask(sampler, include_prompt_logprobs=True, target_prompt_logprobs=tensor)
    answer = response.target_prompt_logprobs
    assert (answer.dtype, answer.shape) == ("float32", [LENGTH - 1, 3])
    assert answer.sparse_crow_indices == tensor.sparse_crow_indices
    assert answer.sparse_col_indices == tensor.sparse_col_indices
    logprobs = np.zeros(ids.shape, np.float32)
    logprobs[(ids >= 0) if is_sparse else (ids >= -1)] = answer.data
    assert not logprobs[ids < 0].any()
    own = np.array(response.prompt_logprobs[1:], np.float32)
    kept = [row for row in range(LENGTH - 1) if row not in (4, 6)]
    np.testing.assert_array_equal(logprobs[kept, 1], own[kept])
    np.testing.assert_allclose(logprobs[4], all_logprobs(trained, 5)[[7, 0, VOCABULARY - 1]], atol=1e-4)


def test_draws_for_a_prompt_follow_from_the_seed_and_leave_the_samples_alone(trained, sampler):
    params = drawn(max_tokens=5, seed=8)
    plain = ask(sampler, params=params, num_samples=2)
    first, again = (ask(sampler, params=params, num_samples=2, prompt_alt_tokens_k=TOLD) for _ in range(2))
    for answer, expected in zip(first.sequences, plain.sequences, strict=True):
        assert answer.tokens == expected.tokens
    alternatives = first.prompt_alt_tokens
    assert alternatives.tokens.shape == alternatives.logprobs.shape == [LENGTH - 1, TOLD]
    assert alternatives.tokens.tolist() == again.prompt_alt_tokens.tokens.tolist()
    other = ask(sampler, params=drawn(max_tokens=5, seed=9), prompt_alt_tokens_k=TOLD).prompt_alt_tokens
    assert other.tokens.tolist() != alternatives.tokens.tolist()
    tokens, logprobs = alternatives.tokens.to_numpy(), alternatives.logprobs.to_numpy()
    expected = all_logprobs(trained, 3)
    np.testing.assert_allclose(logprobs[2], expected[tokens[2]], atol=1e-4)
    likeliest = ask(sampler, params=greedy(), prompt_alt_tokens_k=TOLD, topk_prompt_logprobs=TOLD)
    best = [row[0][0] for row in likeliest.topk_prompt_logprobs[1:]]
    assert likeliest.prompt_alt_tokens.tokens.to_numpy().tolist() == [[token] * TOLD for token in best]


def test_only_the_last_tokens_are_scored_where_that_is_asked_for(sampler):
    whole = ask(sampler, include_prompt_logprobs=True, topk_prompt_logprobs=TOLD)
    some = ask(
        sampler,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=TOLD,
        prompt_logprobs_last_n=3,
        prompt_alt_tokens_k=TOLD,
    )
    assert some.prompt_logprobs[:-3] == some.topk_prompt_logprobs[:-3] == [None] * (LENGTH - 3)
    np.testing.assert_allclose(some.prompt_logprobs[-3:], whole.prompt_logprobs[-3:], atol=1e-5)
    assert len(some.prompt_alt_tokens.tokens.data) == TOLD * (LENGTH - 1)
    last = sampler.compute_logprobs(prompt(PROMPT), LENGTH - 1).result(SECONDS)
    np.testing.assert_allclose(last[1:], whole.prompt_logprobs[1:], atol=1e-5)


def test_everything_at_once_and_in_company_is_what_each_gives_alone(base_sampler):
    wishes = {
        "include_prompt_logprobs": True,
        "topk_prompt_logprobs": TOLD,
        "topk_sample_logprobs": 3,
        "target_prompt_logprobs": tensor_of(np.repeat(PROMPT[1:], 3).reshape(-1, 3), is_sparse=False),
        "prompt_alt_tokens_k": TOLD,
    }
    params = drawn(max_tokens=5, seed=1)
    alone = {name: ask(base_sampler, params=params, **{name: value}) for name, value in wishes.items()}
    company = [base_sampler.sample(prompt(PROMPT[:n]), 2, drawn(seed=n)) for n in range(1, 8)]
    together = ask(base_sampler, params=params, num_samples=3, **wishes)
    for future in company:
        assert future.result(SECONDS).topk_prompt_logprobs is None
    sequence = alone["topk_sample_logprobs"].sequences[0]
    assert together.sequences[0].tokens == sequence.tokens
    pairs = [
        (together.prompt_logprobs_np, alone["include_prompt_logprobs"].prompt_logprobs_np),
        (together.topk_prompt_logprobs_np, alone["topk_prompt_logprobs"].topk_prompt_logprobs_np),
        (together.sequences[0].topk_logprobs_np, sequence.topk_logprobs_np),
        (together.target_prompt_logprobs, alone["target_prompt_logprobs"].target_prompt_logprobs),
        (together.prompt_alt_tokens, alone["prompt_alt_tokens_k"].prompt_alt_tokens),
    ]
    for got, expected in pairs:
        for one, other in zip(_arrays(got), _arrays(expected), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)


def _arrays(value):
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, types.PromptAltTokens):
        return [value.tokens.to_numpy(), value.logprobs.to_numpy()]
    if isinstance(value, types.TensorData):
        return [value.to_numpy()]
    return [value.token_ids, value.logprobs]


def test_a_prompt_of_one_token_has_nothing_to_tell(base_sampler):
    response = ask(
        base_sampler, PROMPT[:1], include_prompt_logprobs=True, topk_prompt_logprobs=2, prompt_alt_tokens_k=2
    )
    assert response.prompt_logprobs == response.topk_prompt_logprobs == [None]
    assert response.prompt_alt_tokens.tokens.shape == [0, 2]


@pytest.mark.parametrize(
    "wishes, complaint",
    [
        ({"topk_prompt_logprobs": 257}, "topk_prompt_logprobs is 257; it must be between 0 and 256"),
        ({"topk_sample_logprobs": -1}, "topk_sample_logprobs is -1"),
        ({"prompt_alt_tokens_k": 300}, "prompt_alt_tokens_k is 300"),
        ({"include_prompt_logprobs": True, "prompt_logprobs_last_n": LENGTH}, f"at most {LENGTH - 1}"),
        ({"target_prompt_logprobs": types.TensorData([3], "int64", [1, 1])}, f"send {LENGTH - 1} rows"),
        (
            {"target_prompt_logprobs": types.TensorData([-1] * (LENGTH - 1), "int64", [LENGTH - 1, 1])},
            "names no token",
        ),
        (
            {"num_samples": 64, "params": drawn(max_tokens=CONTEXT - LENGTH), "topk_sample_logprobs": 256},
            "at most 1048576 values",
        ),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_what_cannot_be_told_is_refused_with_the_reason(base_sampler, wishes, complaint):
    with pytest.raises(tinker.BadRequestError, match=complaint):
        ask(base_sampler, **wishes)
