"""Windows and sinks over pages: both loops give the textbook's result, whatever stands before the window."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.models.attention.page_loop import attend_pages, attend_row_by_row
from spmd_tx.sharding.mesh import AXES, make_mesh

pytestmark = pytest.mark.usefixtures("quickly_compiled")

PAGES, PAGE_SIZE, HEADS, GROUP, WIDTH, LAYER = 80, 4, 2, 2, 8, 1
POSITIONS = np.array([0, 3, 40, 77], np.int32)  # blocks of 8 pages have 32 tokens
TABLE = 20
SINKS = np.array([0.3, -40.0, 2.0, 5.0], np.float32)


def inputs(stale=0.0):
    """Queries, the keys and values of each row, pools that hold them beside ``stale``, and tables."""
    random = np.random.default_rng(1)
    q = random.standard_normal((len(POSITIONS), HEADS * GROUP, WIDTH), dtype=np.float32)
    tables = random.permutation(PAGES).reshape(len(POSITIONS), TABLE).astype(np.int32)
    rows, pools = [], [np.full((2, PAGES, PAGE_SIZE, HEADS * WIDTH), stale, np.float32) for _ in "kv"]
    for row, position in enumerate(POSITIONS):
        order = np.arange(position + 1)
        rows.append(random.standard_normal((2, position + 1, HEADS, WIDTH), dtype=np.float32))
        for pool, values in zip(pools, rows[-1], strict=True):
            pool[LAYER, tables[row][order // PAGE_SIZE], order % PAGE_SIZE] = values.reshape(len(order), -1)
    return q, rows, pools, tables


def textbook(q, rows, sinks, window):
    found = np.zeros_like(q)
    for row, (keys, values) in enumerate(rows):
        first = max(0, len(keys) - window) if window else 0
        for head in range(HEADS * GROUP):
            scores = keys[first:, head // GROUP] @ q[row, head] * WIDTH**-0.5
            shares = np.exp(scores)
            total = shares.sum() + (0 if sinks is None else np.exp(sinks[head]))
            found[row, head] = shares @ values[first:, head // GROUP] / total
    return found


@pytest.mark.parametrize("window", [0, 5, 50])
@pytest.mark.parametrize("sinks", [None, SINKS], ids=["plain", "sinks"])
def test_both_loops_are_the_textbook(window, sinks):
    q, rows, pools, tables = inputs()
    sight = {"window": window, "sinks_N": None if sinks is None else jnp.asarray(sinks)}

    @jax.jit
    @partial(jax.shard_map, mesh=make_mesh(1, 1, 1), in_specs=jax.P(AXES), out_specs=jax.P(AXES))
    def run(q, keys, values, tables, positions):
        pools = keys, values
        one = attend_row_by_row(q, pools, jnp.int32(LAYER), tables, positions, **sight)
        several = attend_pages(q[:, None], pools, jnp.int32(LAYER), tables, positions[:, None], **sight)
        return one, several[:, 0]

    expected = textbook(q, rows, sinks, window)
    for found in run(q, *pools, tables, POSITIONS):
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


def test_pages_before_a_window_may_be_anything():
    """Their owner may have given them back; infinities in them leave no trace."""
    q, _, pools, tables = inputs()
    before = [pool.copy() for pool in pools]
    for pool in pools:
        for row, position in enumerate(POSITIONS):
            order = np.arange(max(0, position - 6 + 1))
            pool[LAYER, tables[row][order // PAGE_SIZE], order % PAGE_SIZE] = np.inf

    @jax.jit
    @partial(jax.shard_map, mesh=make_mesh(1, 1, 1), in_specs=jax.P(AXES), out_specs=jax.P(AXES))
    def run(q, keys, values, tables, positions):
        how = {"window": 6, "sinks_N": jnp.asarray(SINKS)}
        args = (keys, values), jnp.int32(LAYER), tables
        return attend_row_by_row(q, *args, positions, **how), attend_pages(
            q[:, None], *args, positions[:, None], **how
        )

    expected, found = run(q, *before, tables, POSITIONS), run(q, *pools, tables, POSITIONS)
    for ours, theirs in zip(found, expected, strict=True):
        assert np.array_equal(ours, theirs)
