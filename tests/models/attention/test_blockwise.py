"""Attention by blocks and its own way back, beside the textbook's formula and its derivative."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.models.attention import blockwise as blockwise_attention
from spmd_tx.models.attention.blockwise import attend_segments, blocks
from spmd_tx.models.attention.rope import rotate
from spmd_tx.models.families.keys import ConfigKeys
from spmd_tx.models.families.rope import read_rope
from tests.golden.parts import PARTS, SINKS, TOKENS

pytestmark = pytest.mark.usefixtures("quickly_compiled")

HEADS, KV_HEADS, WIDTH, ROWS = 4, 2, 8, 2


def textbook(q_BTNE, k_BTKE, v_BTKE, segments_BT, *, sinks_N=None, scale=WIDTH**-0.5, window=None):
    """One head and one row after the other, with all scores."""
    group, length = q_BTNE.shape[2] // k_BTKE.shape[2], q_BTNE.shape[1]
    is_causal = np.tri(length, dtype=bool) & ~np.tri(length, k=-(window or length), dtype=bool)
    rows = []
    for q_TNE, k_TKE, v_TKE, segments_T in zip(q_BTNE, k_BTKE, v_BTKE, segments_BT, strict=True):
        is_allowed = is_causal & (segments_T[:, None] == segments_T[None])
        heads = []
        for head in range(q_TNE.shape[1]):
            scores = q_TNE[:, head] @ k_TKE[:, head // group].T * scale
            scores = jnp.where(is_allowed, scores, -jnp.inf)
            if sinks_N is not None:
                scores = jnp.concatenate([scores, jnp.full((length, 1), sinks_N[head])], axis=1)
            weights = jax.nn.softmax(scores, axis=-1)[:, :length]
            heads.append(weights @ v_TKE[:, head // group])
        rows.append(jnp.stack(heads, axis=1))
    return jnp.stack(rows)


def inputs(length):
    """q, k, v, the gradient of the result; and segments of different lengths, padding at the end."""
    random = np.random.default_rng(length)
    shapes = [(ROWS, length, heads, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]
    arrays = [random.standard_normal(shape, dtype=np.float32) for shape in shapes]
    segments = np.sort(random.integers(1, 5, (ROWS, length)), axis=1).astype(np.int32)
    segments[:, -length // 8 :] = 0
    return arrays, jnp.asarray(segments)


@pytest.mark.parametrize("length, at_once", [(16, 512), (320, 512), (1024, 64)])
def test_results_and_gradients_are_the_textbooks(monkeypatch, length, at_once):
    monkeypatch.setattr(blockwise_attention, "QUERIES_AT_ONCE", at_once)
    (q, k, v, grad_y), segments = inputs(length)
    found = jax.jit(lambda *x: _both(attend_segments, segments, *x))(q, k, v, grad_y)
    expected = jax.jit(lambda *x: _both(textbook, segments, *x))(q, k, v, grad_y)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def _both(attend, segments, q, k, v, grad_y):
    y, pull_back = jax.vjp(lambda *x: attend(*x, segments), q, k, v)
    return y, *pull_back(grad_y)


def test_windows_sinks_scales_and_narrow_values_are_the_textbooks(monkeypatch):
    monkeypatch.setattr(blockwise_attention, "QUERIES_AT_ONCE", 80)  # two parts of each of two blocks
    (q, k, v, grad_y), segments = inputs(320)
    v, grad_y = v[..., : WIDTH - 3], grad_y[..., : WIDTH - 3]
    how = {"sinks_N": jnp.array([0.5, -20.0, 1.5, 3.0]), "scale": 0.7, "window": 100}
    found = jax.jit(lambda *x: _both(partial(attend_segments, **how), segments, *x))(q, k, v, grad_y)
    expected = jax.jit(lambda *x: _both(partial(textbook, **how), segments, *x))(q, k, v, grad_y)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


def test_no_score_is_computed_for_keys_before_a_blocks_window():
    (q, k, v, _), segments = inputs(1024)
    flops = []
    for window in (0, 16):
        attend = jax.jit(partial(attend_segments, window=window))
        analysis: Any = attend.lower(q, k, v, segments).cost_analysis()
        flops.append(analysis["flops"])
    assert flops[1] < 0.5 * flops[0]


@pytest.mark.parametrize("name", SINKS)
def test_attention_is_that_of_gpt_oss(name):
    case, expected = SINKS[name], np.load(PARTS)[f"attention/{name}"]
    rope = read_rope(ConfigKeys(case.config), case.config["head_dim"])

    @jax.jit
    def attention(w, x, positions):
        def linear(x, name):
            y = x @ w[f"{name}_proj.weight"].T
            return y + jnp.broadcast_to(w[f"{name}_proj.bias"], y.shape)

        q, k, v = (linear(x, each).reshape(1, TOKENS, -1, 16) for each in "qkv")
        q, k = (rotate(each, positions, rope) for each in (q, k))
        how = {"sinks_N": w["sinks"], "window": case.window}
        y = attend_segments(q, k, v, jnp.ones((1, TOKENS), jnp.int32), **how)
        return linear(y.reshape(TOKENS, -1), "o")

    found = attention(case.weights, case.inputs[None], case.positions[None])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_no_score_is_computed_for_keys_behind_a_block():
    (q, k, v, _), segments = inputs(1024)
    lowered = jax.jit(lambda *x: attend_segments(*x)).lower(q, k, v, segments)
    analysis: Any = lowered.compile().cost_analysis()
    everything = 2 * 2 * ROWS * HEADS * WIDTH * 1024**2
    assert analysis["flops"] < 0.9 * everything  # the products alone are 9/16, and exponentials count as well


@pytest.mark.parametrize("length", [1, 63, 64, 100, 512, 4096, 32768])
def test_blocks_are_few_and_cover_the_row(length):
    found = blocks(length)
    assert len(found) <= blockwise_attention.MOST_BLOCKS
    assert [start for start, _ in found[1:]] == [end for _, end in found[:-1]]
    assert (found[0][0], found[-1][1]) == (0, length)
