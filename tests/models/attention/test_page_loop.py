"""All ways to attend to pages are one function, and none sees what is behind a row's last token."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.hlo.hints import told_turns
from spmd_tx.models.attention.kv_cache import KvCache, continue_attend, decode_attend
from spmd_tx.models.attention.page_loop import attend_pages
from spmd_tx.sharding.mesh import AXES, make_mesh
from tests.support.kernels import kernels_of

pytestmark = pytest.mark.usefixtures("quickly_compiled")

PAGES, PAGE_SIZE, HEADS, GROUP, WIDTH = 60, 4, 2, 3, 8
LAYER = 1
WAYS = ["reference", "row_by_row"]
POSITIONS = np.array([0, 3, 4, 32, 43], np.int32)  # blocks of 8 pages have 32 tokens


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def attend(positions, name, *, table=11, stale=0.0, dtype=jnp.float32):
    """[B, N, E] of one layer whose pages hold random keys and values, and ``stale`` behind the positions."""
    tables = 1 + np.random.default_rng(1).permutation(PAGES - 1)[: len(POSITIONS) * table].reshape(-1, table)
    pools = []
    for seed in (2, 3):
        pool = np.full((2, PAGES, PAGE_SIZE, HEADS * WIDTH), stale, np.float32)
        for row, position in enumerate(POSITIONS):
            order = np.arange(position)  # the last token is written by the step itself
            pool[LAYER, tables[row][order // PAGE_SIZE], order % PAGE_SIZE] = random(
                position, HEADS * WIDTH, seed=10 * row + seed
            )
        pools.append(jnp.asarray(pool, dtype))
    q, k, v = (
        random(len(POSITIONS), 1, heads, WIDTH, seed=5 + heads) for heads in (HEADS * GROUP, HEADS, HEADS)
    )
    arrays = (jnp.asarray(x, dtype) for x in (q, k, v))
    return np.asarray(decode(name)(*arrays, *pools, tables.astype(np.int32), positions), np.float32)


@cache
def decode(name):
    @jax.jit
    @partial(jax.shard_map, mesh=make_mesh(1, 1, 1), in_specs=jax.P(AXES), out_specs=jax.P(AXES))
    def run(q, k, v, keys, values, tables, positions):
        step = decode_attend(kernels_of(name), tables, positions, positions >= 0)
        return step(jnp.int32(LAYER), q, k, v, KvCache(keys, values))[0][:, 0]

    return run


@pytest.mark.parametrize(
    "dtype, tolerance", [(jnp.float32, 1e-6), (jnp.bfloat16, 0.02)], ids=["fp32", "bf16"]
)
def test_row_by_row_is_what_all_rows_are_at_once(dtype, tolerance):
    at_once, looped = (attend(POSITIONS, name, dtype=dtype) for name in WAYS)
    assert np.abs(at_once).max() > 0.5
    np.testing.assert_allclose(looped, at_once, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("stale", [np.nan, np.inf, 3e38], ids=str)
def test_what_is_behind_the_last_token_changes_no_bit(stale, name):
    assert np.array_equal(attend(POSITIONS, name, stale=stale), attend(POSITIONS, name))


def test_a_longer_row_changes_no_bit():
    beside_a_longer_one = attend(POSITIONS, "reference")
    short = POSITIONS.copy()
    short[-1] = 5  # the longest row decides how many pages are read
    beside = attend(short, "reference")
    np.testing.assert_array_equal(beside[:-1], beside_a_longer_one[:-1])


def test_a_row_that_nobody_reads_gets_zeros_and_changes_no_other_bit():
    some = POSITIONS.copy()
    some[1] = -1
    alone, beside = attend(some, "row_by_row"), attend(POSITIONS, "row_by_row")
    assert not alone[1].any()
    np.testing.assert_array_equal(np.delete(alone, 1, axis=0), np.delete(beside, 1, axis=0))


LENGTH = 6  # tokens of a row that come at once


def attend_several(first, *, table=40, count=LENGTH, stale=0.0):
    """[T, N, E] of one row whose tokens from position ``first`` on come at once, in a table of any width."""
    pools = []
    tables = 1 + np.arange(table, dtype=np.int32)[None]
    for seed in (2, 3):
        pool = np.full((2, table + 1, PAGE_SIZE, HEADS * WIDTH), stale, np.float32)
        order = np.arange(first)
        known = random(100, HEADS * WIDTH, seed=seed)[:first]
        pool[LAYER, tables[0][order // PAGE_SIZE], order % PAGE_SIZE] = known
        pools.append(jnp.asarray(pool))
    # Each token has its own numbers, whatever comes before it in the row.
    q = random(1, 100, HEADS * GROUP, WIDTH, seed=5)[:, first : first + count]
    k, v = (random(1, 100, HEADS, WIDTH, seed=seed)[:, first : first + count] for seed in (2, 3))
    positions = first + np.arange(count, dtype=np.int32)[None]
    pages = tables[:, positions[0] // PAGE_SIZE]
    return np.asarray(continued()(*map(jnp.asarray, (q, k, v)), *pools, tables, pages, positions))


@cache
def continued():
    @jax.jit
    @partial(jax.shard_map, mesh=make_mesh(1, 1, 1), in_specs=jax.P(AXES), out_specs=jax.P(AXES))
    def run(q, k, v, keys, values, tables, pages, positions):
        step = continue_attend(kernels_of("reference"), tables, pages, positions)
        return step(jnp.int32(LAYER), q, k, v, KvCache(keys, values))[0][0]

    return run


def attend_keys(q_TNE, k_SKE, v_SKE, mask_TS):
    k_SNE, v_SNE = (np.repeat(each, q_TNE.shape[1] // each.shape[1], axis=1) for each in (k_SKE, v_SKE))
    scores_NTS = np.einsum("TNE,SNE->NTS", q_TNE, k_SNE) * q_TNE.shape[-1] ** -0.5
    shares_NTS = np.where(mask_TS, np.exp(scores_NTS), 0)
    probabilities_NTS = shares_NTS / shares_NTS.sum(axis=-1, keepdims=True)
    return np.einsum("NTS,SNE->TNE", probabilities_NTS, v_SNE)


@pytest.mark.parametrize("first", [0, 1, 60, 64, 90])
def test_pages_in_a_loop_are_what_they_are_at_once(first):
    """Blocks of 16 pages have 64 tokens; one row's tokens lie in two of them."""
    q = random(1, 100, HEADS * GROUP, WIDTH, seed=5)[:, first : first + LENGTH]
    k, v = (random(1, 100, HEADS, WIDTH, seed=seed)[:, : first + LENGTH] for seed in (2, 3))
    positions = first + np.arange(LENGTH)
    mask = np.arange(first + LENGTH)[None, None] <= positions[None, :, None]
    at_once = attend_keys(q[0], k[0], v[0], mask[0])
    assert np.abs(at_once).max() > 0.3
    np.testing.assert_allclose(attend_several(first), at_once, rtol=0, atol=1e-6)


@pytest.mark.parametrize("stale", [np.nan, np.inf, 3e38], ids=str)
def test_in_a_loop_neither_stale_pages_nor_wider_tables_change_a_bit(stale):
    for first in (0, 62):
        expected = attend_several(first)
        assert np.array_equal(attend_several(first, stale=stale), expected)
        assert np.array_equal(attend_several(first, table=100), expected)


@pytest.mark.parametrize("sight, turns", [({}, 8), ({"window": 200}, 1), ({"window": 300}, 2)])
def test_a_program_tells_how_many_blocks_are_usually_read(sight, turns):
    """Blocks have 256 tokens, and rows usually 2,048."""
    shapes = [(2, 1, 2, 8), (2, 600, 16, 8), (2, 600, 16, 8), (), (2, 256), (2, 1)]
    dtypes = [jnp.float32] * 3 + [jnp.int32] * 3
    q, keys, values, layer, tables, positions = map(jax.ShapeDtypeStruct, shapes, dtypes)

    @jax.jit
    @partial(jax.shard_map, mesh=make_mesh(1, 1, 1), in_specs=jax.P(), out_specs=jax.P(AXES))
    def run(q, keys, values, layer, tables, positions):
        return attend_pages(q, (keys, values), layer, tables, positions, **sight)

    hlo = run.lower(q, keys, values, layer, tables, positions).compile().as_text()
    told = map(told_turns, re.findall(r'op_name="([^"]*)"', hlo))
    assert set(told) - {None} == {turns}
