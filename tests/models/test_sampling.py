"""Drawing tokens: the right distribution, exactly the right filters, and nothing but the row's own inputs."""

import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.models import sampling
from spmd_tx.models.sampling import BLOCK
from spmd_tx.sharding.mesh import TP, make_mesh

DRAWS = 2048
ROWS = 64  # of what needs few draws: each number of rows is compiled
SMALL, LARGE = 40, 2 * BLOCK + 276  # vocabularies below one block, and of two blocks and a part

quickly = partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
)


def compiled(run):
    """A function of logits and more; optimizing takes less time than it saves where DRAWS rows are drawn."""
    few, many = quickly(run), jax.jit(run)
    return lambda logits, *rest: (many if len(logits) == DRAWS else few)(logits, *rest)


whole = compiled(lambda *inputs: sampling.draw(*inputs)[:2])


def draw_on(devices):
    """The same with the vocabulary split over devices of tp."""
    of_row, mesh = jax.P(), make_mesh(1, 1, devices)

    @compiled
    @partial(jax.shard_map, mesh=mesh, in_specs=(jax.P(None, TP), *[of_row] * 5), out_specs=(of_row, of_row))
    def split(logits, seeds, positions, temperatures, top_k, top_p):
        size = logits.shape[-1] * devices
        any_filters = jnp.any(sampling.filters(temperatures, top_k, top_p, size))
        return sampling.draw_split(logits, seeds, positions, temperatures, top_k, top_p, any_filters)[:2]

    return split


read_less = quickly(lambda *inputs: sampling.draw(*inputs, together=sampling.TOGETHER)[:2])
WAYS = {"whole": whole, "split over two": draw_on(2), "split over four": draw_on(4)}
draw = whole


@pytest.fixture(
    autouse=True,
    params=["whole", "split over two", pytest.param("split over four", marks=pytest.mark.slow)],
)
def way(request, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "draw", WAYS[request.param])
    return request.param


def random_logits(vocabulary: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1.5, vocabulary).astype(np.float32)


def seeds(count: int) -> np.ndarray:
    return np.stack([np.arange(count), np.arange(count)[::-1] * 7], axis=1).astype(np.uint32)


def draw_many(logits, temperature=1.0, top_k=None, top_p=1.0):
    """DRAWS tokens from the same logits, each with a seed of its own, and their log-probabilities."""
    rows = np.tile(logits, (DRAWS, 1))
    same = [np.full(DRAWS, value, np.float32) for value in (temperature, top_p)]
    k = np.full(DRAWS, len(logits) if top_k is None else top_k, np.int32)
    tokens, logprobs = draw(rows, seeds(DRAWS), np.arange(DRAWS, dtype=np.int32) % 50, same[0], k, same[1])
    return np.asarray(tokens), np.asarray(logprobs)


def softmax(logits, temperature=1.0):
    z = logits.astype(np.float64) / temperature
    exponentials = np.exp(z - z.max())
    return exponentials / exponentials.sum()


def allowed(logits, temperature, top_k, top_p) -> set[int]:
    """By sorting: the k most likely tokens, and of these the fewest with the share top_p of their mass."""
    order = np.argsort(-logits, kind="stable")[: len(logits) if top_k is None else top_k]
    share = np.cumsum(softmax(logits[order], temperature))
    return set(order[: int(np.searchsorted(share, top_p)) + 1].tolist())


@pytest.mark.parametrize("vocabulary", [SMALL, LARGE])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_probabilities(vocabulary, temperature):
    logits = random_logits(vocabulary)
    tokens, _ = draw_many(logits, temperature)
    expected = DRAWS * softmax(logits, temperature)
    counts = np.bincount(tokens, minlength=vocabulary)
    # Tokens are pooled, in vocabulary order, into bins of at least 20 expected draws.
    bins = (np.cumsum(expected) // 20).astype(int)
    observed, wanted = np.bincount(bins, weights=counts), np.bincount(bins, weights=expected)
    observed, wanted = observed[wanted > 5], wanted[wanted > 5]
    chi_square = np.sum((observed - wanted) ** 2 / wanted)
    degrees = len(wanted) - 1
    assert degrees > 10
    assert abs(chi_square - degrees) < 4 * np.sqrt(2 * degrees)  # mean and deviation of the distribution


FILTERS = [(2, 7, 1), (0.5, None, 0.7), (1, 12, 0.8), (1, 3, 0.01)]
MORE_FILTERS = [(1, 1, 1), (1, 7, 1), (1, None, 0.3)]


@pytest.mark.parametrize(
    "vocabulary, temperature, top_k, top_p",
    [
        *((SMALL, *each) for each in FILTERS + MORE_FILTERS),
        *((LARGE, *each) for each in FILTERS),
        *(pytest.param(LARGE, *each, marks=pytest.mark.slow) for each in MORE_FILTERS),
    ],
)
def test_filters_keep_exactly_the_tokens_that_sorting_keeps(vocabulary, temperature, top_k, top_p):
    logits = random_logits(vocabulary, seed=3) * (1 if vocabulary == SMALL else 2)
    tokens, _ = draw_many(logits, temperature, top_k, top_p)
    kept = allowed(logits, temperature, top_k, top_p)
    assert set(tokens.tolist()) <= kept
    probabilities = softmax(logits, temperature)
    total = sum(probabilities[token] for token in kept)
    likely = {token for token in kept if probabilities[token] / total * DRAWS > 15}
    assert likely <= set(tokens.tolist())
    assert len(kept) == 1 or len(likely) > 1


@pytest.mark.parametrize("top_k", [SMALL, SMALL + 1, 2**31 - 1])
def test_top_k_of_the_vocabulary_or_more_keeps_everything(top_k):
    logits = random_logits(SMALL)
    assert np.array_equal(draw_many(logits, 1.0, top_k)[0], draw_many(logits)[0])


def test_ties_at_the_threshold_are_all_kept():
    logits = np.full(SMALL, -9.0, np.float32)
    logits[[4, 9, 21]] = 1.0, 0.0, 0.0
    assert set(draw_many(logits, top_k=2)[0].tolist()) == {4, 9, 21}
    assert set(draw_many(logits, top_p=0.6)[0].tolist()) == {4, 9, 21}
    assert set(draw_many(np.zeros(SMALL, np.float32), top_k=1)[0].tolist()) == set(range(SMALL))


def test_the_logprob_is_that_of_the_temperature_before_any_filter():
    logits = random_logits(LARGE)
    for temperature, top_k, top_p in [(1.0, None, 1.0), (0.5, 5, 1.0), (2.0, None, 0.5)]:
        tokens, logprobs = draw_many(logits, temperature, top_k, top_p)
        expected = np.log(softmax(logits, temperature))[tokens]
        np.testing.assert_allclose(logprobs, expected, rtol=0, atol=1e-5)


def test_temperature_zero_takes_the_most_likely_token_and_its_logprob_at_temperature_one():
    logits = random_logits(LARGE)
    tokens, logprobs = draw_many(logits, temperature=0.0, top_k=3, top_p=0.5)
    assert set(tokens.tolist()) == {int(np.argmax(logits))}
    np.testing.assert_allclose(logprobs, np.log(softmax(logits).max()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("temperature", [1e-6, 2e-38, 1e-44])
def test_a_tiny_temperature_is_as_good_as_greedy(temperature):
    logits = 10 * random_logits(SMALL)
    tokens, logprobs = draw_many(logits, temperature)
    assert set(tokens.tolist()) == {int(np.argmax(logits))}
    assert np.all(np.isfinite(logprobs))


def test_tokens_of_probability_zero_are_never_drawn():
    logits = random_logits(LARGE)
    logits[::2] = -np.inf
    tokens, logprobs = draw_many(logits)
    assert np.all(tokens % 2 == 1)
    assert np.all(np.isfinite(logprobs))


@pytest.mark.parametrize("way", ["whole"], indirect=True)
@pytest.mark.parametrize("vocabulary", [pytest.param(SMALL, marks=pytest.mark.slow), BLOCK, LARGE])
def test_the_ends_of_the_uniform_interval_give_tokens_with_mass(monkeypatch, vocabulary):
    ends, each = np.float32([0.0, 1 - 2**-24, 1 - 2**-23]), 64
    rows = len(ends) * each
    monkeypatch.setattr(sampling, "_uniform", lambda seeds, _: jnp.asarray(np.repeat(ends, each)))
    logits = np.stack([random_logits(vocabulary, seed) for seed in range(each)] * len(ends))
    allowed_tokens = np.random.default_rng(0).random(logits.shape) < 0.5
    logits = np.where(allowed_tokens, logits, -np.inf).astype(np.float32)
    ones = np.ones(rows, np.float32)
    k = np.full(rows, vocabulary, np.int32)
    traced_anew = quickly(lambda *inputs: sampling.draw(*inputs)[:2])
    tokens, _ = traced_anew(logits, seeds(rows), np.zeros(rows, np.int32), ones, k, ones)
    assert np.all(allowed_tokens[np.arange(rows), np.asarray(tokens)])
    assert np.array_equal(tokens[:each], np.argmax(allowed_tokens[:each], axis=1))


def mixed_batch(rows: int, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "logits": random.normal(0, 2, (rows, LARGE)).astype(np.float32),
        "seeds": random.integers(0, 2**32, (rows, 2), dtype=np.uint32),
        "positions": random.integers(0, 1000, rows, dtype=np.int32),
        "temperatures": random.choice([0.0, 0.7, 1.0], rows).astype(np.float32),
        "top_k": random.choice([5, LARGE], rows).astype(np.int32),
        "top_p": random.choice([0.9, 1.0], rows).astype(np.float32),
    }


def test_what_a_row_draws_depends_on_the_row_alone():
    row, others = mixed_batch(1, seed=0), mixed_batch(ROWS, seed=1)
    row["top_k"][:], row["top_p"][:], row["temperatures"][:] = LARGE, 1.0, 1.0  # no filter of its own
    alone = [np.repeat(x, ROWS, axis=0) for x in row.values()]
    token, logprob = (np.asarray(each)[:1] for each in whole(*alone))
    others["logits"][3:5] = np.nan
    others["logits"][5] = np.inf
    for place in (0, 4, ROWS - 1):
        batch = {name: np.concatenate([x[:place], row[name], x[place + 1 :]]) for name, x in others.items()}
        tokens, logprobs = map(np.asarray, draw(*batch.values()))
        assert tokens[place] == token[0]
        np.testing.assert_allclose(logprobs[place], logprob[0], rtol=0, atol=1e-6)
        assert np.all((tokens >= 0) & (tokens < LARGE))


def test_the_draw_changes_with_either_half_of_the_seed_and_with_the_position():
    logits = np.zeros((ROWS, LARGE), np.float32)
    seed, positions = np.tile(np.uint32([1, 2]), (ROWS, 1)), np.full(ROWS, 5, np.int32)
    seed[1:3], positions[3] = [[9, 2], [1, 9]], 6
    ones, k = np.ones(ROWS, np.float32), np.full(ROWS, LARGE, np.int32)
    tokens = np.asarray(draw(logits, seed, positions, ones, k, ones)[0])
    assert len(set(tokens[:4].tolist())) == 4
    assert set(tokens[4:].tolist()) == {tokens[0]}


def varied_rows():
    """Arguments of ROWS with and without filters, some of them greedy."""
    random = np.random.default_rng(5)
    return (
        random.normal(0, 3, (ROWS, LARGE)).astype(np.float32),
        seeds(ROWS),
        np.arange(ROWS, dtype=np.int32),
        np.where(np.arange(ROWS) % 5, random.uniform(0.3, 2, ROWS), 0).astype(np.float32),
        np.where(np.arange(ROWS) % 3, LARGE, 9).astype(np.int32),
        np.where(np.arange(ROWS) % 4, 1, 0.7).astype(np.float32),
    )


def test_split_or_whole_the_same_tokens_are_drawn(way):
    arguments = varied_rows()
    (tokens, logprobs), (expected, of_whole) = draw(*arguments), whole(*arguments)
    assert np.array_equal(tokens, expected)
    np.testing.assert_allclose(logprobs, of_whole, rtol=0, atol=1e-5)


@pytest.mark.parametrize("way", ["split over two"], indirect=True)
def test_devices_that_would_choose_different_parts_follow_the_first(way, monkeypatch):
    """As if they rounded differently: else each would add its own token, or none would add any."""
    found = sampling._device_of

    def apart(*arguments):
        device_B, share_B = found(*arguments)
        return (device_B + jax.lax.axis_index(TP)) % 2, share_B

    monkeypatch.setattr(sampling, "_device_of", apart)
    assert np.array_equal(draw_on(2)(*varied_rows())[0], whole(*varied_rows())[0])


@pytest.mark.parametrize("way", ["whole"], indirect=True)
def test_bisections_together_find_what_they_find_one_after_the_other():
    random = np.random.default_rng(6)
    arguments = (
        random.normal(0, 3, (ROWS, LARGE)).astype(np.float32),
        seeds(ROWS),
        np.arange(ROWS, dtype=np.int32),
        random.uniform(0.3, 2, ROWS).astype(np.float32),
        random.integers(1, LARGE, ROWS).astype(np.int32),
        random.uniform(0.1, 1, ROWS).astype(np.float32),
    )
    for one, other in zip(whole(*arguments), read_less(*arguments), strict=True):
        assert np.array_equal(one, other)
