"""The gated delta rule read in chunks is the recurrence, segment by segment, in whatever pieces."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.models.linear_attention.delta_rule import CHUNK, read_rows, read_token, unit_lower_inverse
from tests.golden import delta_cases as cases
from tests.golden.delta_cases import NUMBERS

pytestmark = pytest.mark.usefixtures("quickly_compiled")

K_HEADS, GROUP, WIDTH, V_WIDTH = 2, 2, 8, 4
HEADS = K_HEADS * GROUP


def random_rows(rows, length, seed=0, *, alike=False):
    """Return q, k, v, decay and strength. With ``alike``, all keys of a head are nearly the same."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, rows, length, K_HEADS, WIDTH))
    if alike:
        k = k * 0.01 + rng.normal(size=(K_HEADS, WIDTH))
    v = rng.normal(size=(rows, length, HEADS, V_WIDTH))
    decay = -np.abs(rng.normal(size=(rows, length, HEADS))) * (0.001 if alike else 0.2)
    strength = 1 / (1 + np.exp(-rng.normal(size=(rows, length, HEADS)) - (5 if alike else 0)))
    return tuple(x.astype(np.float32) for x in (q, k, v, decay, strength))


def recurrence(q, k, v, decay, strength, memory=None):
    """Return the results of one sequence [T, H, V], and the memory after it, in float64."""
    q, k, v, decay, strength = (x.astype(np.float64) for x in (q, k, v, decay, strength))
    q, k = (np.repeat(x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6), GROUP, axis=1) for x in (q, k))
    memory = np.zeros((HEADS, WIDTH, V_WIDTH)) if memory is None else memory.astype(np.float64)
    results = []
    for t in range(len(q)):
        memory = memory * np.exp(decay[t])[:, None, None]
        new = strength[t][:, None] * (v[t] - np.einsum("hev,he->hv", memory, k[t]))
        memory = memory + k[t][:, :, None] * new[:, None]
        results.append(np.einsum("hev,he->hv", memory, q[t]) * WIDTH**-0.5)
    return np.array(results), memory


read = jax.jit(read_rows)


@pytest.mark.parametrize("alike", [False, True], ids=["random keys", "keys that are alike"])
def test_packed_segments_are_sequences_of_their_own(alike):
    lengths = [[1, 70, 2, 127], [200]]
    x = random_rows(2, 208, seed=1, alike=alike)
    segments = np.zeros((2, 208), np.int32)
    for row, row_lengths in enumerate(lengths):
        segments[row, : sum(row_lengths)] = np.repeat(np.arange(len(row_lengths)) + 1, row_lengths)
    result, memory = read(*x, segments)
    for row, row_lengths in enumerate(lengths):
        starts = np.cumsum([0, *row_lengths])
        for start, end in itertools.pairwise(starts):
            expected, _ = recurrence(*(each[row, start:end] for each in x))
            np.testing.assert_allclose(result[row, start:end], expected, rtol=0, atol=3e-6)
        _, last = recurrence(*(each[row, starts[-2] : starts[-1]] for each in x))
        np.testing.assert_allclose(memory[row], last, rtol=0, atol=3e-6)


@pytest.mark.slow
def test_pieces_that_end_at_multiples_of_a_chunk_change_no_bit():
    length = 5 * CHUNK + 9
    ends = (0, 2 * CHUNK, 3 * CHUNK, 5 * CHUNK, length)
    x, segments = random_rows(2, length, seed=2), np.ones((2, length), np.int32)
    nothing = np.zeros((2, HEADS, WIDTH, V_WIDTH), np.float32)
    whole, last = read(*x, segments, nothing)
    memory, parts = nothing, []
    for start, end in itertools.pairwise(ends):
        # Every piece is padded to the same row, as Prefills are.
        piece = [np.zeros((2, 2 * CHUNK, *each.shape[2:]), np.float32) for each in x]
        mask = np.zeros((2, 2 * CHUNK), np.int32)
        mask[:, : end - start] = 1
        for to, each in zip(piece, x, strict=True):
            to[:, : end - start] = each[:, start:end]
        result, memory = read(*piece, mask, memory)
        parts.append(result[:, : end - start])
    assert np.array_equal(np.concatenate(parts, axis=1), whole)
    assert np.array_equal(memory, last)


def test_other_rows_change_no_bit():
    x, segments = random_rows(3, 2 * CHUNK, seed=3), jnp.ones((3, 2 * CHUNK), jnp.int32)
    other = random_rows(3, 2 * CHUNK, seed=4)
    mixed = [np.concatenate([b[:1], a[1:2], b[2:]]) for a, b in zip(x, other, strict=True)]

    @jax.jit
    def gradient(*x):
        def loss(*x):
            result, memory = read_rows(*x, segments_BT=segments)
            return jnp.sum(jnp.sin(result)) + jnp.sum(memory), result

        return jax.grad(loss, argnums=(0, 1, 2, 3, 4), has_aux=True)(*x)

    found = jax.tree.map(np.asarray, (gradient(*x), gradient(*mixed)))
    for one, two in zip(*map(jax.tree.leaves, found), strict=True):
        assert np.array_equal(one[1], two[1])
        assert not np.array_equal(one[0], two[0])


def test_decoding_goes_on_where_reading_ended():
    length, more = CHUNK + 7, 5
    x = random_rows(2, length + more, seed=5)
    segments = np.tile(np.arange(length + more) < length, (2, 1)).astype(np.int32)
    _, memory = read(*x, segments)
    step = jax.jit(read_token)
    for t in range(length, length + more):
        result, memory = step(*(each[:, t] for each in x), memory)
        for row in range(2):
            expected, _ = recurrence(*(each[row, : t + 1] for each in x))
            np.testing.assert_allclose(result[row], expected[-1], rtol=0, atol=3e-6)


def test_the_inverse_and_its_gradient_hold_where_keys_are_alike():
    rng = np.random.default_rng(6)
    lower = np.tril(0.98 + 0.02 * rng.uniform(size=(2, CHUNK, CHUNK)), -1).astype(np.float32)
    slope = rng.normal(size=lower.shape).astype(np.float32)

    @jax.jit
    def both(lower, slope):
        inverse, back = jax.vjp(unit_lower_inverse, lower)
        return inverse, back(slope)[0]

    inverse, gradient = both(lower, slope)
    exact = np.linalg.inv(np.eye(CHUNK) + lower.astype(np.float64))
    np.testing.assert_allclose(inverse, exact, rtol=0, atol=1e-5)
    expected = -np.tril(np.swapaxes(exact, 1, 2) @ slope @ np.swapaxes(exact, 1, 2), -1)
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-4)


def test_results_and_gradients_equal_those_of_transformers():
    golden, inputs = np.load(NUMBERS), cases.rule_inputs()
    segments = jnp.ones((1, cases.LENGTH), jnp.int32)

    def rule(*inputs):
        return read_rows(*(x[None] for x in inputs), segments_BT=segments)

    @jax.jit
    def both(slope, *inputs):
        (result, memory), back = jax.vjp(rule, *inputs)
        return result, memory, back((slope[None], jnp.zeros_like(memory)))

    result, memory, gradients = both(cases.rule_slope(), *inputs.values())
    np.testing.assert_allclose(result[0], golden["rule/result"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(memory[0], golden["rule/memory"], rtol=0, atol=1e-5)
    for name, gradient in zip(inputs, gradients, strict=True):
        expected = golden[f"rule/grad_{name}"]
        np.testing.assert_allclose(
            gradient, expected, rtol=0, atol=3e-5 * np.abs(expected).max(), err_msg=name
        )
