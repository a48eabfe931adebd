"""A Gated DeltaNet layer and gated attention equal those of transformers, in training and in decode."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.models import gates
from spmd_tx.models.attention.blockwise import attend_segments
from spmd_tx.models.attention.kv_cache import copy_pages
from spmd_tx.models.forward_pass import StateSlots
from spmd_tx.models.layers import rotate
from spmd_tx.models.linear_attention import delta_memory, state_pool
from spmd_tx.models.linear_attention.delta_layer import State, convolve, mix
from spmd_tx.models.named import Named
from spmd_tx.sharding.mesh import DATA, TP, abstract_mesh, make_mesh
from spmd_tx.sharding.weight import specs
from tests.golden import delta_cases as cases
from tests.golden.delta_cases import EPS, HEAD_DIM, LENGTH, NUMBERS, ROTATED, SIZES, THETA
from tests.support.kernels import kernels_of

pytestmark = pytest.mark.usefixtures("quickly_compiled")

READ = 147  # tokens read in pieces; the others are decoded
COLUMNS, BY_HEAD = jax.P(None, TP), jax.P(TP)
SPECS = dict.fromkeys(("q", "k", "v", "z", "a", "b"), COLUMNS)
SPECS |= {"taps": jax.P(), "a_log": BY_HEAD, "dt_bias": BY_HEAD, "norm": jax.P(), "out": jax.P(TP)}


def layer(w, x, *where, **how):
    """Return the layer's results, summed over tp, and the state after each row."""
    y, state = mix(SIZES, Named(w), lambda name: x @ w[name], *where, **how)
    return jax.lax.psum(y @ w["out"], TP), state


def rows_of(mesh, x):
    """Return the sequence in all rows, one for each data shard."""
    return np.repeat(x[None], mesh.size // mesh.shape[TP], axis=0)


def on_mesh(mesh, run, *row_arrays):
    """Run over rows that are split over the data shards; the layer's weights are split over tp."""
    weights = cases.layer_weights()
    in_specs = (SPECS, *[jax.P(DATA)] * len(row_arrays))
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=jax.P(DATA)))(
        weights, *row_arrays
    )


@pytest.mark.parametrize("shape", [(2, 1, 2)], ids=str)
def test_results_and_gradients_equal_those_of_transformers(shape):
    mesh, golden = make_mesh(*shape), np.load(NUMBERS)

    def run(w, x, segments, positions, slope):
        result, back = jax.vjp(lambda x: layer(w, x, segments, positions)[0], x)
        return result, back(slope)[0]

    x, slope = rows_of(mesh, cases.layer_input()), rows_of(mesh, cases.layer_slope())
    segments, positions = (
        rows_of(mesh, np.ones(LENGTH, np.int32)),
        rows_of(mesh, np.arange(LENGTH, dtype=np.int32)),
    )
    result, gradient = on_mesh(mesh, run, x, segments, positions, slope)
    for row in range(len(x)):
        np.testing.assert_allclose(result[row], golden["layer/result"], rtol=0, atol=5e-5)
        expected = golden["layer/grad_input"]
        np.testing.assert_allclose(gradient[row], expected, rtol=0, atol=3e-5 * np.abs(expected).max())


@pytest.mark.parametrize("product", ["reference", pytest.param("triton", marks=pytest.mark.slow)])
def test_a_row_is_read_in_pieces_and_decoded_from_its_slot(product, monkeypatch):
    monkeypatch.setattr(delta_memory, "LEAST_COLUMNS", 2)
    mesh, golden = make_mesh(2, 1, 2), np.load(NUMBERS)

    def with_free_slots(w):
        numbers = np.full(w.shape, np.nan, w.dtype)
        numbers[:, [0, 5]] = 0
        return numbers

    pool = jax.tree.map(with_free_slots, state_pool.pool_weights(SIZES, mesh, 2, 5, jnp.float32))
    pool_specs = specs(state_pool.pool_weights(SIZES, mesh, 2, 5, jnp.float32))

    def run(w, pool, x, slots):
        results, number = [], jnp.int32(1)
        ends = [0, 64, READ, *range(READ + 1, LENGTH + 1)]
        for start, end in itertools.pairwise(ends):
            where = StateSlots(slots if start else jnp.zeros_like(slots), slots, decodes=start >= READ)
            before = state_pool.read(pool, number, where, kernels_of(product))
            assert isinstance(before.memory, delta_memory.InPool) == (product == "triton" and start >= READ)
            segments = jnp.ones((1, end - start), jnp.int32)
            positions = jnp.arange(start, end)[None]
            piece = x[:, start:end], segments, positions, before
            result, state = layer(w, *piece, decodes=start >= READ)
            pool = state_pool.write(pool, number, slots, state)
            results.append(result)
        return jnp.concatenate(results, axis=1), pool

    in_specs = (SPECS, pool_specs, jax.P(DATA), jax.P(DATA))
    out_specs = jax.P(DATA), pool_specs
    step = jax.jit(
        jax.shard_map(
            run, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=product == "reference"
        )
    )
    x = rows_of(mesh, cases.layer_input())
    result, after = step(cases.layer_weights(), pool, x, np.array([3, 1], np.int32))
    for row in range(2):
        np.testing.assert_allclose(result[row], golden["layer/result"], rtol=0, atol=5e-5)
    for leaf in jax.tree.leaves(after):
        is_written = np.isfinite(leaf).all(axis=tuple(range(2, leaf.ndim)))
        assert is_written.tolist() == [
            [True, False, False, False, False, True, False, False, False, False],
            [True, False, False, True, False, True, True, False, False, False],
        ]


def test_slots_are_copied_in_order_in_all_layers():
    numbers = np.arange(10, dtype=np.float32)
    pool = State(jnp.array(numbers.reshape(2, 5, 1, 1, 1)), jnp.array(numbers.reshape(2, 5, 1, 1)))
    copies = np.array([(1, 2), (2, 3), (0, 4), (0, 0)], np.int32)
    after = jax.jit(copy_pages)(pool, copies)
    for leaf in jax.tree.leaves(after):
        assert np.asarray(leaf).reshape(2, 5).tolist() == [[0, 1, 1, 1, 0], [5, 6, 6, 6, 5]]


def test_the_pool_takes_the_bytes_that_its_sizes_say():
    pool = state_pool.pool_weights(SIZES, abstract_mesh(2, 2, 2), layers=3, slots=7, dtype=jnp.bfloat16)
    stored = sum(np.prod(w.shape) * jnp.dtype(w.dtype).itemsize for w in (pool.memory, pool.inputs))
    assert stored == 3 * 7 * 4 * SIZES.state_bytes(2)


def test_a_segment_does_not_see_the_inputs_of_the_one_before():
    run = jax.jit(convolve)
    x, taps = cases.random(1, 1, 9, 3), cases.random(2, 3, 4)
    segments, positions = np.int32([[[1, 1, 2, 2, 2, 2, 2, 0, 0]], [[0, 1, 0, 1, 2, 3, 4, 0, 0]]])
    packed, last = run(x, taps, segments, positions)
    alone, _ = run(x[:, 2:7], taps, segments[:, 2:7], positions[:, 2:7])
    packed, alone = np.asarray(packed), np.asarray(alone)
    assert np.array_equal(packed[:, 2:7], alone)
    assert np.array_equal(last, x[:, 4:7])
    _, before = run(x[:, 2:4], taps, segments[:, 2:4], positions[:, 2:4])
    goes_on, _ = run(x[:, 4:7], taps, segments[:, 4:7], positions[:, 4:7], before)
    assert np.array_equal(goes_on, alone[:, 2:])


def test_gated_attention_equals_that_of_transformers():
    golden, w = np.load(NUMBERS), jax.tree.map(jnp.asarray, cases.attention_weights())

    def rope(x):
        positions = jnp.arange(LENGTH)[None]
        return jnp.concatenate([rotate(x[..., :ROTATED], positions, THETA), x[..., ROTATED:]], axis=-1)

    def attention(x):
        q, gate = gates.query_and_gate(x @ w["q"], HEAD_DIM)
        k, v = ((x @ w[name]).reshape(1, LENGTH, -1, HEAD_DIM) for name in "kv")
        q, k = (rope(gates.zero_centred_norm(y, w[f"{name}_norm"], EPS)) for y, name in ((q, "q"), (k, "k")))
        y = gates.open_by(attend_segments(q, k, v, jnp.ones((1, LENGTH), jnp.int32)), gate)
        return y.reshape(1, LENGTH, -1) @ w["o"]

    @jax.jit
    def both(x, slope):
        result, back = jax.vjp(attention, x)
        return result[0], back(slope)[0][0]

    result, gradient = both(cases.layer_input()[None], cases.layer_slope()[None])
    np.testing.assert_allclose(result, golden["attention/result"], rtol=0, atol=1e-5)
    expected = golden["attention/grad_input"]
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=3e-5 * np.abs(expected).max())
