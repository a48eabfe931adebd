"""A window that is read in pieces and decoded from its ring is what the whole row sees; old tokens go."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.models.attention.blockwise import attend_segments
from spmd_tx.models.attention.kv_cache import KvCache
from spmd_tx.models.attention.window_ring import (
    continue_attend,
    decode_attend,
    length_of,
    prefill_attend,
    ring_weights,
)
from spmd_tx.models.declared.mixers import Softmax
from spmd_tx.models.forward_pass import StateSlots
from spmd_tx.protocol.commands import MOST_FOLLOWERS
from spmd_tx.protocol.kernels import Kernels
from spmd_tx.sharding.mesh import DATA, TP, make_mesh
from spmd_tx.sharding.weight import specs
from tests.support.kernels import kernels_of

pytestmark = pytest.mark.usefixtures("quickly_compiled")

KV_HEADS, GROUP, WIDTH = 2, 3, 16
LAYERS, LAYER, SLOTS = 2, 1, 5  # slots per data shard
PIECES, DECODED = (5, 70, 130), 20  # ends of the pieces that are read, and tokens behind them
HEADS = jax.P(DATA, None, TP)


def places_written(window, ends, count):
    """Return the places of a row's ring that hold a token: the last of each piece, and decoded ones."""
    pieces = [(start, min(end, count)) for start, end in itertools.pairwise([0, *ends])]
    kept = [range(max(start, end - window), end) for start, end in pieces] + [range(ends[-1], count)]
    return {position % length_of(window) for positions in kept for position in positions}


def random(*shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(
    "window, name, ends",
    [
        pytest.param(1, "reference", PIECES, marks=pytest.mark.slow),
        pytest.param(7, "row_by_row", PIECES, marks=pytest.mark.slow),
        pytest.param(64, "reference", PIECES, marks=pytest.mark.slow),
        (64, "row_by_row", PIECES),
        (200, "reference", PIECES),
        pytest.param(16, "triton", PIECES, marks=pytest.mark.slow),
        # Prompts as long as the window, and a token shorter or longer; then pieces that end where it does.
        (16, "row_by_row", (16,)),
        pytest.param(16, "row_by_row", (15,), marks=pytest.mark.slow),
        pytest.param(16, "row_by_row", (17,), marks=pytest.mark.slow),
        pytest.param(16, "reference", (16, 32, 33), marks=pytest.mark.slow),
        pytest.param(7, "reference", (6, 7, 14, 22), marks=pytest.mark.slow),
    ],
)
def test_pieces_and_tokens_see_what_a_whole_row_sees(window, name, ends):
    kernels, mesh = kernels_of(name), make_mesh(2, 1, 2)
    mixer = Softmax(KV_HEADS * GROUP, KV_HEADS, WIDTH, None, 1e-6, window=window, sinks=True)
    declared = ring_weights(mixer, mesh, (LAYERS, 2 * SLOTS), jnp.float32)
    stale = jax.tree.map(lambda w: np.full(w.shape, np.nan, np.float32), declared)
    # Row 1 ends before the others' pieces do; where it has no tokens a piece is padding.
    read, length = ends[-1], ends[-1] + DECODED
    lengths = np.array([[length], [length * 2 // 3]], np.int32)
    q = random(2, length, KV_HEADS * GROUP, WIDTH, seed=0)
    k, v = (random(2, length, KV_HEADS, WIDTH, seed=seed) for seed in (1, 2))
    sinks = random(KV_HEADS * GROUP, seed=3)

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(specs(declared), *[HEADS] * 3, jax.P(TP), jax.P(DATA), jax.P(DATA)),
        out_specs=(HEADS, specs(declared), HEADS),
        check_vma=name != "triton",
    )
    def run(rings, q, k, v, sinks, slots, lengths):
        sight = {"window": window, "sinks_N": sinks}
        index, results = jnp.int32(LAYER), []
        for start, end in itertools.pairwise([0, *ends]):
            positions = jnp.arange(start, end, dtype=jnp.int32)[None]
            segments = (positions < lengths).astype(jnp.int32)
            where = StateSlots(slots if start else jnp.zeros_like(slots), slots, decodes=False)
            given = window, segments, positions * segments, where
            attend = continue_attend(kernels, *given) if start else prefill_attend(Kernels(), *given)
            piece = (x[:, start:end] for x in (q, k, v))
            result, rings = attend(index, *piece, rings, **sight)
            results.append(result)

        def decode(rings, position):
            is_alive = lengths[:, 0] > position
            where = StateSlots(slots, jnp.where(is_alive, slots, 0), decodes=True)
            attend = decode_attend(kernels, window, where, position[None], is_alive)
            token = (jax.lax.dynamic_slice_in_dim(x, position, 1, axis=1) for x in (q, k, v))
            result, rings = attend(index, *token, rings, **sight)
            return rings, result[:, 0]

        rings, drawn = jax.lax.scan(decode, rings, jnp.arange(read, length, dtype=jnp.int32))
        results.append(drawn.swapaxes(0, 1))
        segments = (jnp.arange(length)[None] < lengths).astype(jnp.int32)
        whole = attend_segments(q, k, v, segments_BT=segments, **sight)
        return jnp.concatenate(results, axis=1), rings, whole

    result, rings, whole = run(stale, q, k, v, sinks, np.array([3, 1], np.int32), lengths)
    result, whole = np.asarray(result), np.asarray(whole)
    for row, count in enumerate(lengths[:, 0]):
        np.testing.assert_allclose(result[row, :count], whole[row, :count], rtol=0, atol=2e-6)
    written = [len(places_written(window, ends, count)) for count in lengths[:, 0].tolist()]
    assert isinstance(rings, KvCache)
    for pool in (np.asarray(rings.keys), np.asarray(rings.values)):
        is_there = np.isfinite(pool).all(axis=-1).sum(axis=-1)
        expected = np.zeros((LAYERS, 2 * SLOTS), int)
        expected[LAYER, 3], expected[LAYER, SLOTS + 1] = written
        assert is_there.tolist() == expected.tolist()


@pytest.mark.parametrize("window", [1, 16, 24])
def test_wrong_drafts_take_nothing_that_is_still_seen(window):
    """Rows read ahead up to MOST_FOLLOWERS tokens; of these so many are right that steps begin anywhere."""
    length, kernels, mesh = 4 * length_of(window), kernels_of("row_by_row"), make_mesh(1, 1, 1)
    mixer = Softmax(KV_HEADS * GROUP, KV_HEADS, WIDTH, None, 1e-6, window=window)
    declared, many = ring_weights(mixer, mesh, (1, 3), jnp.float32), 1 + MOST_FOLLOWERS
    rings = jax.tree.map(lambda w: np.full(w.shape, np.nan, np.float32), declared)
    q = random(1, length, KV_HEADS * GROUP, WIDTH, seed=0)
    k, v = (random(1, length, KV_HEADS, WIDTH, seed=seed) for seed in (1, 2))

    in_specs = specs(declared), jax.P(), jax.P(), *[HEADS] * 3

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=in_specs, out_specs=(HEADS, specs(declared)))
    def step(rings, position, right, q, k, v):
        depths, slots, is_alive = jnp.arange(1 + MOST_FOLLOWERS), jnp.full(many, 2), jnp.full(many, True)
        where = StateSlots(slots, slots, decodes=True, depths_B=depths)
        attend = decode_attend(kernels, window, where, position + depths, is_alive)
        of_drafts = (jnp.where((depths <= right)[:, None, None, None], x, 1e4) for x in (k, v))
        return attend(jnp.int32(0), q, *of_drafts, rings, window=window)

    results, position = [], 0
    rights = np.random.default_rng(3).integers(0, many, length)
    while position + many <= length:
        here, right = slice(position, position + many), int(rights[position])
        q_B, k_B, v_B = (x[0, here][:, None] for x in (q, k, v))
        found, rings = step(rings, position, right, q_B, k_B, v_B)
        results.append(np.asarray(found)[: right + 1, 0])
        position += right + 1
    whole = jax.jit(partial(attend_segments, window=window))(q, k, v, np.ones((1, length), np.int32))
    np.testing.assert_allclose(np.concatenate(results), whole[0, :position], rtol=0, atol=2e-6)
