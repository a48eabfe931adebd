"""Attention to the pages of rows on TPUs, as a Pallas kernel for Mosaic.

A core goes through the rows one after the other, and copies the next block of pages from its memory while it
attends to the last one, as the ragged paged attention of JAX does. All heads of a page come at once, one
beside the other.

Dimension key as in queries.py; Q queries of a step, W tokens read at once.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float, Int

from spmd_tx.models.attention.paged.queries import (
    LOWEST,
    by_head,
    by_token,
    estimate,
    positions_by_head,
    sinks_by_head,
)
from spmd_tx.models.pallas import dot, output

LANES, SUBLANES = 128, 16  # of a tile of bfloat16
SEVERAL_QUERIES = 256  # of a step and a head, where a row has several tokens
BLOCK_BYTES = 1 << 20  # of keys that are read at once, at most; there are two such blocks, and two of values
MOST_TOKENS = 256  # read at once


def attend(
    q_BTNE: Float[Array, "B T N E"],
    pools: tuple[Array, Array],
    index: Array,
    tables_BN: Int[Array, "B _"],
    positions_BT: Int[Array, "B T"],
    *,
    interpret: bool = False,
    sinks_N: Float[Array, " N"] | None = None,
    window: int = 0,
) -> Float[Array, "B T N E"]:
    """Attend from all tokens of a row to the tokens up to their positions."""
    from jax.experimental.pallas import tpu as pltpu

    b, t, n, e = q_BTNE.shape
    _, _, page_size, wide = pools[0].shape
    heads, group = wide // e, n * e // wide
    queries = min(SEVERAL_QUERIES, -(-t * group // SUBLANES) * SUBLANES)
    pages = _pages_at_once(pools[0])
    tables_BN = jnp.pad(tables_BN, ((0, 0), (0, -tables_BN.shape[1] % pages)))
    q_BKRE = by_head(q_BTNE, heads, queries)
    positions_BR = positions_by_head(positions_BT, group, queries)
    steps = q_BKRE.shape[2] // queries  # of a row
    positions_IQ = positions_BR.reshape(b * steps, queries)
    lasts_I = jnp.max(positions_IQ, axis=1)
    befores_I = jnp.full_like(lasts_I, -1)  # the last tokens that are out of sight of all queries of a step
    if window:
        firsts_I = jnp.min(jnp.where(positions_IQ < 0, lasts_I[:, None], positions_IQ), axis=1)
        befores_I = jnp.maximum(firsts_I - window, -1)
    last_step = b * steps - 1

    def row(step: Array) -> Array:
        return step // steps

    def of_step(step: Array, *_: Any) -> tuple[Any, ...]:
        return row(step), 0, step % steps, 0

    def table(ahead: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (1, 1, tables_BN.shape[1]),
            lambda step, *_: (row(jnp.minimum(step + ahead, last_step)), 0, 0),
            memory_space=pltpu.SMEM,
        )

    of_queries = pl.BlockSpec((1, heads, queries, e), of_step)
    sinks = []
    if sinks_N is not None:
        sinks = [sinks_by_head(sinks_N, heads, q_BKRE.shape[2])[..., None]]
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3,
        grid=(b * steps,),
        in_specs=[
            *(table(0), table(1)),
            pl.BlockSpec((1, queries, 1), lambda step, *_: (row(step), step % steps, 0)),
            *(pl.BlockSpec((heads, queries, 1), lambda step, *_: (0, step % steps, 0)) for _ in sinks),
            *(of_queries, anywhere, anywhere),
        ],
        out_specs=of_queries,
        scratch_shapes=[
            *(pltpu.VMEM((2, pages, page_size, wide), pools[0].dtype) for _ in pools),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SMEM((1,), jnp.int32),
            *(pltpu.VMEM((heads, queries, LANES), jnp.float32) for _ in range(2)),
            pltpu.VMEM((heads, queries, e), jnp.float32),
        ],
    )
    call = pl.pallas_call(
        partial(_kernel, window, bool(sinks)),
        out_shape=output(q_BKRE.shape, q_BKRE.dtype, q_BKRE),
        grid_spec=grid,
        compiler_params=None if interpret else pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=estimate(q_BTNE, pools, tables_BN.shape[1] * page_size, window),
        interpret=interpret,
        name="paged_attention",
    )
    tables = tables_BN[:, None]
    of_steps = jnp.atleast_1d(index), lasts_I, befores_I
    y_BKRE = call(*of_steps, tables, tables, positions_BR[..., None], *sinks, q_BKRE, *pools)
    return by_token(y_BKRE, t, group)


def _pages_at_once(pool: Array) -> int:
    _, _, page_size, wide = pool.shape
    tokens = min(MOST_TOKENS, BLOCK_BYTES // (wide * pool.dtype.itemsize))
    return max(1, tokens // page_size)


def _kernel(
    window: int,
    has_sinks: bool,
    index_ref: Any,
    lasts_ref: Any,
    befores_ref: Any,
    table_ref: Any,
    next_table_ref: Any,
    positions_ref: Any,
    *others: Any,
) -> None:
    from jax.experimental.pallas import tpu as pltpu

    sinks_ref, others = (others[0], others[1:]) if has_sinks else (None, others)
    q_ref, keys_ref, values_ref, y_ref, key_blocks, value_blocks, semaphores, first_place, *sums = others
    highest, total, summed = sums
    _, pages, page_size, wide = key_blocks.shape
    width, step = pages * page_size, pl.program_id(0)
    last, before = lasts_ref[step], befores_ref[step]
    begin = (before + 1) // width
    next_begin = (befores_ref[jnp.minimum(step + 1, pl.num_programs(0) - 1)] + 1) // width
    # A row that sees nothing reads a block, too: each step leaves the next one's first block on its way.
    count = jnp.maximum(begin + 1, (last + width) // width)

    def copies(table: Any, block: Any, place: Any) -> list[Any]:
        """Return the copies of a block's pages to one of the two places."""
        found = []
        for number in range(pages):
            page = table[0, 0, block * pages + number]
            for pool, blocks in ((keys_ref, key_blocks), (values_ref, value_blocks)):
                source, target = pool.at[index_ref[0], page], blocks.at[place, number]
                found.append(pltpu.make_async_copy(source, target, semaphores.at[place]))
        return found

    def start(table: Any, block: Any, place: Any) -> None:
        for copy in copies(table, block, place):
            copy.start()

    @pl.when(step == 0)
    def _() -> None:
        first_place[0] = 0
        start(table_ref, begin, 0)

    first = first_place[0]
    if sinks_ref is None:
        highest[...] = jnp.full(highest.shape, LOWEST, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
    else:
        highest[...] = jnp.broadcast_to(sinks_ref[...], highest.shape)
        total[...] = jnp.ones(total.shape, jnp.float32)
    summed[...] = jnp.zeros(summed.shape, jnp.float32)

    def add(block: Array, _: None) -> None:
        place = (first + block - begin) % 2

        @pl.when(block + 1 < count)
        def _() -> None:
            start(table_ref, block + 1, 1 - place)

        @pl.when((block + 1 == count) & (step + 1 < pl.num_programs(0)))
        def _() -> None:
            start(next_table_ref, next_begin, 1 - place)

        for copy in copies(table_ref, block, place):
            copy.wait()
        keys_WX, values_WX = (blocks[place].reshape(width, wide) for blocks in (key_blocks, value_blocks))
        span = block * width, before, last, window
        _attend_to_block(span, positions_ref, q_ref, keys_WX, values_WX, highest, total, summed)

    lax.fori_loop(begin, count, add, None)
    first_place[0] = (first + count - begin) % 2
    for head in range(q_ref.shape[1]):
        y_QE = summed[head] / jnp.maximum(total[head, :, :1], 1.0)  # the highest score adds 1
        y_ref[0, head] = y_QE.astype(y_ref.dtype)


def _attend_to_block(
    span: tuple[Array, Array, Array, int],
    positions_ref: Any,
    q_ref: Any,
    keys_WX: Array,
    values_WX: Array,
    highest: Any,
    total: Any,
    summed: Any,
) -> None:
    """Add a block of tokens to the sums of every head.

    ``span`` holds the block's first token, those between which there are any to be seen, and the window.
    """
    begin, before, last, window = span
    width, e = keys_WX.shape[0], q_ref.shape[3]
    # A page's earlier owner may have left infinities, and zero times infinity is not zero.
    order_W1 = begin + lax.broadcasted_iota(jnp.int32, (width, 1), 0)
    is_there_W1 = (order_W1 <= last) & (order_W1 > before)
    values_WX = jnp.where(is_there_W1, values_WX, jnp.zeros_like(values_WX))
    order_QW = begin + lax.broadcasted_iota(jnp.int32, (q_ref.shape[2], width), 1)
    is_seen_QW = order_QW <= positions_ref[0]
    if window:
        is_seen_QW &= order_QW > positions_ref[0] - window
    for head in range(q_ref.shape[1]):
        mine = slice(head * e, (head + 1) * e)
        scores_QW = dot(q_ref[0, head], keys_WX[:, mine], 1, 1) * e**-0.5
        scores_QW = jnp.where(is_seen_QW, scores_QW, LOWEST)
        before_Q1 = highest[head, :, :1]
        now_Q1 = jnp.maximum(before_Q1, jnp.max(scores_QW, axis=1, keepdims=True))
        scale_Q1 = jnp.exp(before_Q1 - now_Q1)
        shares_QW = jnp.where(is_seen_QW, jnp.exp(scores_QW - now_Q1), 0.0)
        added_QE = dot(shares_QW.astype(values_WX.dtype), values_WX[:, mine])
        total_Q1 = total[head, :, :1] * scale_Q1 + jnp.sum(shares_QW, axis=1, keepdims=True)
        highest[head] = jnp.broadcast_to(now_Q1, highest.shape[1:])
        total[head] = jnp.broadcast_to(total_Q1, total.shape[1:])
        summed[head] = summed[head] * scale_Q1 + added_QE
