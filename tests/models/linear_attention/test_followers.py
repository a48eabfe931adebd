"""Rows that follow others have the results and states of rows that read the same tokens one after another."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from spmd_tx.models.linear_attention.delta_memory import InPool
from spmd_tx.models.linear_attention.delta_rule import read_token
from spmd_tx.models.linear_attention.followers import inputs_before, read_in_turn

DEPTHS = np.int32([0, 1, 2, 0, 0, 1])  # rows with two followers, none and one
HEADS, VALUES, WIDTH, TAPS, CHANNELS = 2, 4, 8, 4, 3
ROWS = DEPTHS.size


def random(*shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_a_memory_goes_on_from_the_row_before():
    q, k = (random(ROWS, HEADS, WIDTH, seed=seed) for seed in (0, 1))
    v, decay, strength = (random(ROWS, VALUES, *more, seed=len(more)) for more in ((WIDTH,), (), ()))
    token, alone = (q, k, v, -np.abs(decay), strength), jax.jit(read_token)
    memory = random(ROWS, VALUES, WIDTH, WIDTH, seed=5)
    got, after = jax.jit(
        lambda memory, *token: read_in_turn(partial(read_token, *token), memory, jnp.array(DEPTHS), token[2])
    )(memory, *token)
    kept = memory[:1]
    for row, depth in enumerate(DEPTHS.tolist()):
        before = memory[row][None] if not depth else kept
        one, kept = alone(*(x[row][None] for x in token), before)
        np.testing.assert_allclose(got[row], one[0], rtol=0, atol=1e-5)
        np.testing.assert_allclose(after[row], kept[0], rtol=0, atol=1e-5)


def test_a_memory_in_its_pool_is_found_where_the_row_before_left_it():
    def read(where):
        found = where.pool[where.sources_B] + 1
        return found, where.pool.at[jnp.where(where.targets_B == 0, 99, where.targets_B)].set(
            found, mode="drop"
        )

    pool, slots = jnp.arange(0.0, 80, 10), jnp.array([3, 1, 6, 5, 7, 2])
    where = InPool(pool, jnp.int32(0), slots, slots)
    in_turn = jax.jit(lambda v: read_in_turn(read, where, jnp.array(DEPTHS), v))
    got, after = in_turn(np.zeros(ROWS, np.float32))
    assert got.tolist() == [31, 32, 33, 51, 71, 72]
    assert after.tolist() == [0, 32, 72, 31, 40, 51, 33, 71]


def test_a_convolution_sees_the_tokens_of_the_rows_before():
    kept, read = random(ROWS, TAPS - 1, CHANNELS, seed=0), random(ROWS, CHANNELS, seed=1)
    got = jax.jit(inputs_before)(kept, read, DEPTHS)
    for row, depth in enumerate(DEPTHS.tolist()):
        leader = row - depth
        whole = np.concatenate([kept[leader], read[leader:row]])
        assert np.array_equal(got[row], whole[-(TAPS - 1) :])
