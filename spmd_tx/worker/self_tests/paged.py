"""Compares an attention to pages with the reference, on the device. attention.py runs it.

Dimension key as in models/attention/kv_cache.py.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec as P

from spmd_tx.models.attention.page_loop import Pools
from spmd_tx.models.attention.paged.attention import paged_attention, sharing, takes
from spmd_tx.models.attention.window_ring import PAGE
from spmd_tx.protocol.kernels import Kernels
from spmd_tx.sharding.mesh import DATA, TP
from spmd_tx.worker.self_tests.verdict import mesh_of, problem_between

LAYERS, LAYER = 2, 1
PAGES = 40  # of a row's table
SEVERAL = 70  # tokens of a row that come at once
SAMPLES = [4, 5, 6, 7, 8]  # the rows that have half of their pages in common


def problem_of(kernels: Kernels, sizes: Any) -> str | None:
    """Say why an implementation must not be used for these AttentionSizes; None if it is correct.

    It must be close to the reference, give the same bits twice, and the same for a row whatever the others
    hold and wherever it stands. Behind the last token of a row, and before its window, pages hold infinities.
    """
    for window in sizes.windows:
        page_size = PAGE if window else sizes.page_size
        if not takes(kernels.pages, sizes.head_dim, page_size):
            continue
        problem = _problem_in(window, kernels, msgspec.structs.replace(sizes, page_size=page_size))
        if problem is not None:
            return f"{problem} in a window of {window} tokens" if window else problem
    return None


def _problem_in(window: int, kernels: Kernels, sizes: Any) -> str | None:
    sight = sight_of(window, sizes)
    run, reference = (
        implementation(each, sizes.device, keeps_values=sizes.keeps_values, **sight)
        for each in (kernels, Kernels(pages="reference"))
    )
    for tokens in (1, SEVERAL):
        q, pools, tables, positions = inputs(sizes, tokens, window)
        with jax.default_matmul_precision("highest"):
            exact = reference(*(x.astype(jnp.float32) for x in (q, *pools)), tables, positions)
        once, again = (np.asarray(run(q, *pools, tables, positions)) for _ in range(2))
        what = f"{tokens} tokens of a row"
        results = (np.asarray(each)[:-1] for each in (once, exact, again))
        if problem := problem_between(f"attention from {what}", *results):
            return problem
        turned = np.roll(np.arange(len(tables)), 1)
        elsewhere = np.asarray(run(q[turned], *pools, tables[turned], positions[turned]))
        is_same = elsewhere.tobytes() == once[turned].tobytes()
        for row in (1, SAMPLES[0]):
            alone = np.where(np.arange(len(tables))[:, None] == row, positions, -1)
            is_same &= np.asarray(run(q, *pools, tables, alone))[row].tobytes() == once[row].tobytes()
        if not is_same:
            return f"attention from {what} depends on other rows"
    return None


def inputs(
    sizes: Any, tokens: int, window: int = 0
) -> tuple[Array, tuple[Array, Array], np.ndarray, np.ndarray]:
    """Return queries [B, T, N, E], pools, tables and positions; nobody reads the last row."""
    random, page = np.random.default_rng(tokens), sizes.page_size
    half = PAGES * page // 2
    lasts = np.array([*(page - 1, page, 2 * page + 5, PAGES * page - 1), *(half for _ in SAMPLES), -1])
    lasts = np.where(lasts < 0, -1, np.maximum(lasts, tokens - 1))
    count = len(lasts) * PAGES + 1
    tables = 1 + random.permutation(count - 1).reshape(len(lasts), PAGES).astype(np.int32)
    tables[1, 0] = tables[0, 0]  # two rows have their first page in common
    prompt = PAGES // 2 - 1
    tables[SAMPLES, :prompt] = tables[SAMPLES[0], :prompt]
    shape = (LAYERS, count, page, sizes.kv_heads * sizes.head_dim)
    pools = random.standard_normal((2, *shape), np.float32)
    for table, last in zip(tables, lasts, strict=True):
        order = np.arange(PAGES * page)
        unseen = order[(order > last) | (order <= last - tokens + 1 - window if window else False)]
        pools[:, :, table[unseen // page], unseen % page] = np.inf
    keys, values = (jnp.asarray(pool, jnp.bfloat16) for pool in pools)
    q = random.standard_normal((len(lasts), tokens, sizes.heads, sizes.head_dim), np.float32)
    positions = lasts[:, None] - np.arange(tokens)[::-1] if tokens > 1 else lasts[:, None]
    positions = np.where(lasts[:, None] < 0, -1, positions).astype(np.int32)
    return jnp.asarray(q, jnp.bfloat16), (keys, values), tables, positions


def implementation(
    kernels: Kernels, device: int, *, keeps_values: bool = True, **sight: Any
) -> Callable[..., Array]:
    """Return (queries, keys, values, tables, positions) -> results, as the steps use it: inside shard_map.

    Without ``keeps_values``, the keys are the values, too.
    """
    mesh, heads, pool = mesh_of(device), P(DATA, None, TP), P(None, DATA, None, TP)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(heads, pool, pool, P(DATA), P(DATA)), out_specs=heads)
    def attend(q: Array, keys: Array, values: Array, tables: Array, positions: Array) -> Array:
        return attended(kernels, q, (keys, values if keeps_values else None), tables, positions, **sight)

    return attend


def attended(
    kernels: Kernels, q: Array, pools: Pools, tables: Array, positions: Array, **sight: Any
) -> Array:
    """Attend as the steps do: rows of one token read pages together, but for those in a window."""
    b, tokens, n, e = q.shape
    if tokens == 1 and "window" not in sight:
        sight |= sharing(kernels, (b, n, e), pools[0], tables, positions[:, 0])
    return paged_attention(kernels, q, pools, jnp.int32(LAYER), tables, positions, **sight)


def sight_of(window: int, sizes: Any) -> dict[str, Any]:
    """Return the keyword arguments of attention with a window and sinks, where there are any."""
    sight: dict[str, Any] = {"window": window} if window else {}
    return sight | {"sinks_N": jnp.linspace(-2.0, 2.0, sizes.heads)} if sizes.has_sinks else sight
