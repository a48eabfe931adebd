"""Drawing within a grammar: exactly the filtered distribution restricted to the allowed tokens."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.models import sampling
from spmd_tx.models.grammar_draw import WORD, GrammarRows
from spmd_tx.models.sampling import BLOCK
from spmd_tx.sharding.mesh import TP, make_mesh

DRAWS = 4_000  # of every test: each number of rows is compiled
VOCABULARY = BLOCK + 88
NOTHING_FORCED = -1
# Of the chi-square distribution that far out, 1 in 100 lies beyond (Wilson and Hilferty 1931).
OUT = 2.326


def grammar_rows(allowed, forced=NOTHING_FORCED, is_masked=True):
    words = np.zeros(-(-VOCABULARY // WORD), np.uint32)
    for token in allowed:
        words[token // WORD] |= np.uint32(1 << token % WORD)
    return GrammarRows(
        np.full(DRAWS, forced, np.int32),
        np.tile(words, (DRAWS, 1)),
        np.full(DRAWS, is_masked),
        np.asarray(is_masked),
    )


whole = jax.jit(lambda logits, *rest: sampling.draw(logits, *rest[:-1], grammar=rest[-1]))


def split_over(devices):
    mesh, of_row = make_mesh(1, 1, devices), jax.P()
    in_specs = (jax.P(None, TP), *[of_row] * 6)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=in_specs, out_specs=(of_row,) * 3)
    def split(logits, seeds, positions, temperatures, top_k, top_p, grammar):
        any_filters = jnp.any(sampling.filters(temperatures, top_k, top_p, VOCABULARY))
        rest = (seeds, positions, temperatures, top_k, top_p)
        return sampling.draw_split(logits, *rest, any_filters, grammar)[:3]

    return split


WAYS = {"whole": whole, "split over two": split_over(2)}


@pytest.fixture(params=WAYS)
def draw(request):
    return WAYS[request.param]


def inputs(logits, temperature=1.0, top_k=VOCABULARY, top_p=1.0):
    seeds = np.stack([np.arange(DRAWS), np.arange(DRAWS)[::-1] * 7], axis=1).astype(np.uint32)
    same = [np.full(DRAWS, value, np.float32) for value in (temperature, top_p)]
    positions = np.arange(DRAWS, dtype=np.int32) % 50
    return np.tile(logits, (DRAWS, 1)), seeds, positions, same[0], np.full(DRAWS, top_k, np.int32), same[1]


def random_logits(seed=0):
    return np.random.default_rng(seed).normal(0, 1.5, VOCABULARY).astype(np.float32)


def softmax(logits, temperature=1.0):
    z = logits.astype(np.float64) / temperature
    exponentials = np.exp(z - z.max())
    return exponentials / exponentials.sum()


def kept_by(logits, temperature, top_k, top_p):
    order = np.argsort(-logits, kind="stable")[:top_k]
    share = np.cumsum(softmax(logits[order], temperature))
    return order[: int(np.searchsorted(share, top_p)) + 1]


def fits(tokens, probabilities):
    """Say whether the draws fit the probabilities: chi-square with p above 0.01."""
    expected = len(tokens) * probabilities
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert not counts[probabilities == 0].any()
    bins = (np.cumsum(expected) // 20).astype(int)
    observed, wanted = np.bincount(bins, weights=counts), np.bincount(bins, weights=expected)
    observed, wanted = observed[wanted > 5], wanted[wanted > 5]
    degrees = len(wanted) - 1
    assert degrees > 3
    bound = degrees * (1 - 2 / (9 * degrees) + OUT * np.sqrt(2 / (9 * degrees))) ** 3
    return np.sum((observed - wanted) ** 2 / wanted) < bound


ALLOWED = np.sort(np.random.default_rng(7).choice(VOCABULARY, 60, replace=False))


@pytest.mark.parametrize(
    "temperature, top_k, top_p", [(1.0, VOCABULARY, 1.0), (0.7, VOCABULARY, 0.9), (1.0, 150, 1.0)]
)
def test_masked_draws_have_the_restricted_distribution(draw, temperature, top_k, top_p):
    logits = random_logits()
    arrays = inputs(logits, temperature, top_k, top_p)
    tokens, logprobs, _ = map(np.asarray, draw(*arrays, grammar_rows(ALLOWED)))
    left = np.intersect1d(kept_by(logits, temperature, top_k, top_p), ALLOWED)
    wanted = np.zeros(VOCABULARY)
    wanted[left] = softmax(logits, temperature)[left]
    assert fits(tokens, wanted / wanted.sum())
    np.testing.assert_allclose(logprobs, np.log(softmax(logits, temperature))[tokens], rtol=0, atol=1e-5)


def test_an_allowed_token_is_drawn_as_without_a_mask(draw):
    logits = random_logits(1)
    arrays = inputs(logits)
    free, _, of_nobody = map(np.asarray, draw(*arrays, grammar_rows([], is_masked=False)))
    within, _, redrawn = map(np.asarray, draw(*arrays, grammar_rows(ALLOWED)))
    was_allowed = np.isin(free, ALLOWED)
    assert 200 < was_allowed.sum() < DRAWS - 200
    assert np.array_equal(free[was_allowed], within[was_allowed])
    assert np.array_equal(redrawn, ~was_allowed)
    assert not of_nobody.any()
    assert np.isin(within, ALLOWED).all()


def test_if_filters_leave_nothing_the_grammar_alone_counts(draw):
    logits = random_logits(2)
    unlikely = np.argsort(logits)[:40]
    arrays = inputs(logits, 1.0, 5, 1.0)
    tokens, *_ = map(np.asarray, draw(*arrays, grammar_rows(unlikely)))
    wanted = np.zeros(VOCABULARY)
    wanted[unlikely] = softmax(logits)[unlikely]
    assert fits(tokens, wanted / wanted.sum())


def test_tokens_whose_mass_is_too_small_for_a_float_are_drawn_in_proportion(draw):
    logits = random_logits(3)
    logits[ALLOWED[:2]] = -300.0, -300.0 + np.log(3)
    tokens, logprobs, _ = map(np.asarray, draw(*inputs(logits), grammar_rows(ALLOWED[:2])))
    share = np.mean(tokens == ALLOWED[1])
    assert abs(share - 0.75) < 0.035
    assert np.isfinite(logprobs).all()


def test_greedy_takes_the_likeliest_allowed_token(draw):
    logits = random_logits(4)
    tokens, logprobs, _ = map(np.asarray, draw(*inputs(logits, 0.0), grammar_rows(ALLOWED)))
    likeliest = ALLOWED[np.argmax(logits[ALLOWED])]
    assert set(tokens.tolist()) == {int(likeliest)}
    np.testing.assert_allclose(logprobs, np.log(softmax(logits))[likeliest], rtol=0, atol=1e-5)


def test_a_forced_token_is_taken_with_its_own_logprob(draw):
    logits = random_logits(5)
    tokens, logprobs, _ = map(np.asarray, draw(*inputs(logits, 0.5), grammar_rows(ALLOWED, forced=17)))
    assert set(tokens.tolist()) == {17}
    np.testing.assert_allclose(logprobs, np.log(softmax(logits, 0.5))[17], rtol=0, atol=1e-5)
