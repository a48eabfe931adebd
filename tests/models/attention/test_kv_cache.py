"""Writing to pages and copying them loses nothing, however XLA carries out scatters.

With --xla_gpu_exclude_nondeterministic_ops XLA replaces each scatter whose indices may repeat by writes of
single numbers. It sorts those by their place in the whole array, as an integer of 32 bits, and keeps the last
of equal ones. That is emulated here with integers of few bits and small pools.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from spmd_tx.models.attention.kv_cache import KvCache, copy_pages, write
from spmd_tx.models.linear_attention import state_pool

pytestmark = pytest.mark.usefixtures("quickly_compiled")

LAYERS, PAGES, PAGE_SIZE, HEADS, WIDTH = 2, 40, 4, 2, 8
SHAPE = (LAYERS, PAGES, PAGE_SIZE, HEADS * WIDTH)
KEYS = 1 << 8  # different integers; the pools have 20 times as many numbers


def scattered(operand, indices, updates, *, dimension_numbers, unique_indices, mode, **_):
    """What lax.scatter does on such a GPU."""
    operand, indices, updates = np.array(operand), np.asarray(indices), np.asarray(updates)
    windows, inserted = dimension_numbers.update_window_dims, dimension_numbers.inserted_window_dims
    assert mode == lax.GatherScatterMode.FILL_OR_DROP
    assert not dimension_numbers.operand_batching_dims
    window_dims = [d for d in range(operand.ndim) if d not in inserted]
    sizes = dict(zip(window_dims, (updates.shape[d] for d in windows), strict=True))
    batch = [d for d in range(updates.ndim) if d not in windows]
    places, values = [], []
    for at in itertools.product(*(range(updates.shape[d]) for d in batch)):
        start = np.zeros(operand.ndim, np.int64)
        start[list(dimension_numbers.scatter_dims_to_operand_dims)] = indices[at]
        end = start + [sizes.get(d, 1) for d in range(operand.ndim)]
        if (start < 0).any() or (end > operand.shape).any():
            continue
        where = np.ix_(*map(np.arange, start, end))
        places.append(np.ravel_multi_index(where, operand.shape).ravel())
        values.append(np.moveaxis(updates, batch, range(len(batch)))[at].ravel())
    if not places:
        return jnp.asarray(operand)
    places, values = np.concatenate(places), np.concatenate(values)
    if unique_indices:
        assert len(set(places)) == len(places), "unique indices were promised"
    else:
        last = {place % KEYS: number for number, place in enumerate(places)}
        kept = list(last.values())
        places, values = places[kept], values[kept]
    operand.ravel()[places] = values
    return jnp.asarray(operand)


@pytest.fixture(autouse=True)
def gpu(monkeypatch):
    calls = []

    def impl(*args, **params):
        calls.append(params["unique_indices"])
        return scattered(*args, **params)

    def loop(first, end, body, carry):
        for number in range(int(first), int(end)):
            carry = body(jnp.int32(number), carry)
        return carry

    monkeypatch.setattr(lax, "fori_loop", loop)
    monkeypatch.setattr(lax.scatter_p, "impl", impl)
    with jax.disable_jit():
        yield calls


def random_cache(seed=0):
    keys, values = np.random.default_rng(seed).normal(size=(2, *SHAPE)).astype(np.float32)
    return KvCache(jnp.asarray(keys), jnp.asarray(values))


def test_the_emulation_loses_writes_whose_places_differ_by_a_multiple_of_its_integers(gpu):
    pool = jnp.zeros(SHAPE)
    apart = KEYS // (PAGE_SIZE * HEADS * WIDTH)
    target = jnp.array([5, 5 + apart])
    lost = pool.at[:, target].set(1.0)
    kept = pool.at[:, target].set(1.0, unique_indices=True)
    assert gpu == [False, True]
    assert 0 < float(lost.sum()) < float(kept.sum()) == 2 * pool[:, 0].size


@pytest.mark.parametrize("at_once", [1, 16])
@pytest.mark.parametrize("count, most", [(0, 16), (1, 16), (17, 18), (16, 16)])
def test_pages_are_copied_whatever_their_distance(at_once, count, most):
    cache = random_cache()
    pages = 1 + np.random.default_rng(count).permutation(PAGES - 1)[: 2 * count].reshape(2, count)
    copies = np.zeros((most, 2), np.int32)
    copies[:count] = pages.T
    copied = copy_pages(cache, jnp.asarray(copies), at_once)
    for before, after in ((cache.keys, copied.keys), (cache.values, copied.values)):
        expected = np.array(before)
        expected[:, pages[1]] = expected[:, pages[0]]
        assert np.array_equal(after, expected)


def test_one_page_is_copied_to_many():
    cache, targets = random_cache(), np.arange(2, 32)
    copies = np.stack([np.full_like(targets, 1), targets], axis=1).astype(np.int32)
    for at_once in (1, 16):
        keys = np.asarray(copy_pages(cache, jnp.asarray(copies), at_once).keys)
        assert np.array_equal(keys[:, targets], np.repeat(np.asarray(cache.keys)[:, 1:2], 30, axis=1))


@pytest.mark.parametrize("rows", [(60,), (4, 15)], ids=["a decode", "a prefill"])
def test_tokens_are_written_whatever_the_distance_of_their_pages(rows, gpu):
    """A third of them go to page 0, which nobody reads; the others each have a place of their own."""
    random, cache = np.random.default_rng(1), random_cache()
    flat = PAGE_SIZE + random.permutation((PAGES - 1) * PAGE_SIZE)[: np.prod(rows)]
    flat = np.where(np.arange(len(flat)) % 3, flat, 0).reshape(rows)
    pages, places = flat // PAGE_SIZE, flat % PAGE_SIZE
    k, v = random.normal(size=(2, *rows, HEADS, WIDTH)).astype(np.float32)
    arrays = (jnp.asarray(pages, jnp.int32), jnp.asarray(places, jnp.int32), jnp.asarray(k), jnp.asarray(v))
    written = write(cache, jnp.int32(1), *arrays)
    assert gpu, "it was emulated"
    for before, new, after in ((cache.keys, k, written.keys), (cache.values, v, written.values)):
        expected = np.array(before)
        expected[1, pages[pages > 0], places[pages > 0]] = new[pages > 0].reshape(-1, HEADS * WIDTH)
        assert np.array_equal(after[:, 1:], expected[:, 1:])


def test_states_are_written_whatever_the_distance_of_their_slots(gpu):
    """A third of them go to slot 0, which nobody reads."""
    random, rows = np.random.default_rng(2), 24
    pool = jnp.asarray(random.normal(size=(LAYERS, 40, 4, 16)), jnp.float32)
    new = random.normal(size=(rows, 4, 16)).astype(np.float32)
    slots = np.where(np.arange(rows) % 3, 1 + random.permutation(39)[:rows], 0)
    after = state_pool._written(pool, jnp.int32(1), jnp.asarray(slots, jnp.int32), jnp.asarray(new))
    assert gpu, "it was emulated"
    expected = np.array(pool)
    expected[1, slots[slots > 0]] = new[slots > 0]
    assert np.array_equal(after, expected)
