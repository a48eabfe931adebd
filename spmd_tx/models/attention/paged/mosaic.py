"""Attention to the pages of rows on TPUs, as a Pallas kernel for Mosaic.

A core goes through the rows one after the other, and copies the next block of pages from its memory while it
attends to the last one, as the ragged paged attention of JAX does. All heads of a page come at once, one
beside the other. A row that shares its first pages with the next ones attends for them, too.

Dimension key as in queries.py; Q queries of a product, W tokens read at once, S slot of a row among queries.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float, Int

from spmd_tx.hlo.hints import COUNTS_ARRAYS
from spmd_tx.models.attention.paged.prefixes import PrefixGroups, prefix_groups
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
MOST_ROWS = 16  # that a row reads pages for, itself among them
GROUP_BYTES = 4 << 20  # of what is kept of a group's rows while its pages are read, at most


def attend(
    q_BTNE: Float[Array, "B T N E"],
    pools: tuple[Array, Array],
    index: Array,
    tables_BN: Int[Array, "B _"],
    positions_BT: Int[Array, "B T"],
    *,
    interpret: bool = False,
    shared: PrefixGroups | None = None,
    sinks_N: Float[Array, " N"] | None = None,
    window: int = 0,
) -> Float[Array, "B T N E"]:
    """Attend from all tokens of a row to the tokens up to their positions.

    ``shared`` is that of ``sharing``; None: rows read their pages alone.
    """
    from jax.experimental.pallas import tpu as pltpu

    b, t, n, e = q_BTNE.shape
    _, _, page_size, wide = pools[0].shape
    heads, group = wide // e, n * e // wide
    queries = _queries(t, group)
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
    last_step, tiles, per = b * steps - 1, 1, 0
    groups, all_queries, kept, slots_B = [], [], [], None
    if shared is not None:
        per, most = queries // group, _most_rows(heads, queries, group, e)
        tiles, lasts_I = -(-most // per), lasts_I[shared.rows]
        is_first_I = shared.members > 0
        befores_I = jnp.where(is_first_I, -1, shared.blocks * pages * page_size - 1)
        groups = [shared.rows, shared.members, shared.places, shared.blocks]
        slots_B = jnp.zeros_like(lasts_I).at[shared.rows].set(shared.places % per, unique_indices=True)
        is_its_BR = jnp.arange(queries)[None] // group == slots_B[:, None]
        q_BKRE = jnp.where(is_its_BR[:, None, :, None], _repeated(q_BKRE[:, :, :group], queries), 0)
        positions_BR, all_queries = jnp.where(is_its_BR, positions_BT, -1), [q_BKRE]
        kept = [
            pltpu.VMEM((most, heads, queries, e), q_BTNE.dtype),
            pltpu.VMEM((tiles, heads, queries, e), q_BTNE.dtype),
            pltpu.SemaphoreType.DMA((1,)),
        ]

    def row(step: Array, *scalars: Any) -> Array:
        return step // steps if shared is None else scalars[3][step]

    def of_step(step: Array, *scalars: Any) -> tuple[Any, ...]:
        return row(step, *scalars), 0, step % steps, 0

    def table(ahead: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (1, 1, tables_BN.shape[1]),
            lambda step, *scalars: (row(jnp.minimum(step + ahead, last_step), *scalars), 0, 0),
            memory_space=pltpu.SMEM,
        )

    of_steps = [jnp.atleast_1d(index), lasts_I, befores_I, *groups]
    of_queries = pl.BlockSpec((1, heads, queries, e), of_step)
    sinks = []
    if sinks_N is not None:
        sinks = [sinks_by_head(sinks_N, heads, q_BKRE.shape[2])[..., None]]
    tables = tables_BN[:, None]  # for a step and, once more, for the next one
    given = [tables, positions_BR[..., None], *sinks, q_BKRE]
    whole = [*of_steps, *given, q_BKRE]  # results are as large as queries
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(of_steps),
        grid=(b * steps,),
        in_specs=[
            *(table(0), table(1)),
            pl.BlockSpec((1, queries, 1), lambda step, *scalars: (row(step, *scalars), step % steps, 0)),
            *(pl.BlockSpec((heads, queries, 1), lambda step, *_: (0, step % steps, 0)) for _ in sinks),
            *(of_queries, *(anywhere for _ in all_queries), anywhere, anywhere),
        ],
        out_specs=of_queries,
        scratch_shapes=[
            *(pltpu.VMEM((2, pages, page_size, wide), pools[0].dtype) for _ in pools),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SMEM((1,), jnp.int32),
            *(pltpu.VMEM((tiles, heads, queries, LANES), jnp.float32) for _ in range(2)),
            pltpu.VMEM((tiles, heads, queries, e), jnp.float32),
            *kept,
        ],
    )
    call = pl.pallas_call(
        partial(_kernel, window, bool(sinks), per),
        out_shape=output(q_BKRE.shape, q_BKRE.dtype, q_BKRE),
        grid_spec=grid,
        compiler_params=None if interpret else pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=estimate(q_BTNE, pools, tables_BN.shape[1] * page_size, window, whole),
        interpret=interpret,
        name="paged_attention",
    )
    with jax.named_scope(COUNTS_ARRAYS):
        y_BKRE = call(*of_steps, tables, *given, *all_queries, *pools)
    if slots_B is not None:
        y_BKSGE = y_BKRE[:, :, : per * group].reshape(b, heads, -1, group, e)
        y_BKRE = jnp.take_along_axis(y_BKSGE, slots_B[:, None, None, None, None], axis=2)[:, :, 0]
    return by_token(y_BKRE, t, group)


def sharing(
    q_shape: tuple[int, int, int], pool: Array, tables_BN: Int[Array, "B N"], lasts_B: Int[Array, " B"]
) -> PrefixGroups | None:
    """Find which rows of one token, whose queries are [B, N, E], read their first pages together.

    ``lasts_B`` are the rows' last positions, -1 where nobody reads a row; layers must have no window.
    """
    b, n, e = q_shape
    if b == 1:
        return None
    _, _, page_size, wide = pool.shape
    heads, group = wide // e, n * e // wide
    most = _most_rows(heads, _queries(1, group), group, e)
    return prefix_groups(_pages_at_once(pool), page_size, tables_BN, lasts_B, most)


def _queries(tokens: int, group: int) -> int:
    """Return the queries of a product."""
    return min(SEVERAL_QUERIES, -(-tokens * group // SUBLANES) * SUBLANES)


def _most_rows(heads: int, queries: int, group: int, width: int) -> int:
    """Return for how many rows of one token one of them reads their first pages."""
    tile_bytes = heads * queries * (2 * LANES + width) * 4
    return min(MOST_ROWS, max(1, GROUP_BYTES // tile_bytes) * (queries // group))


def _repeated(q_BKGE: Array, queries: int) -> Array:
    """Repeat a row's queries up to so many."""
    group = q_BKGE.shape[2]
    return jnp.tile(q_BKGE, (1, 1, -(-queries // group), 1))[:, :, :queries]


def _pages_at_once(pool: Array) -> int:
    _, _, page_size, wide = pool.shape
    tokens = min(MOST_TOKENS, BLOCK_BYTES // (wide * pool.dtype.itemsize))
    return max(1, tokens // page_size)


def _kernel(
    window: int,
    has_sinks: bool,
    per: int,
    index_ref: Any,
    lasts_ref: Any,
    befores_ref: Any,
    *others: Any,
) -> None:
    """``per`` rows have their queries in one product; 0: rows read their pages alone."""
    from jax.experimental.pallas import tpu as pltpu

    def taken(count: int) -> tuple[Any, ...]:
        nonlocal others
        found, others = others[:count], others[count:]
        return found

    group = taken(4 if per else 0)
    table_ref, next_table_ref, positions_ref = taken(3)
    sinks_ref = taken(1)[0] if has_sinks else None
    q_ref = taken(1)[0]
    queries_ref = taken(1)[0] if per else None
    keys_ref, values_ref, y_ref, key_blocks, value_blocks, semaphores, first_place = taken(7)
    highest, total, summed, *kept = others
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

    def reset(tile: Array | int, _: None) -> None:
        if sinks_ref is None:
            highest[tile] = jnp.full(highest.shape[1:], LOWEST, jnp.float32)
            total[tile] = jnp.zeros(total.shape[1:], jnp.float32)
        else:
            highest[tile] = jnp.broadcast_to(sinks_ref[...], highest.shape[1:])
            total[tile] = jnp.ones(total.shape[1:], jnp.float32)
        summed[tile] = jnp.zeros(summed.shape[1:], jnp.float32)

    members = blocks = own = 0
    tiles, q_tiles = 1, q_ref
    if per:
        rows_ref, *of_group = group
        members, place, blocks = (each[step] for each in of_group)
        own, tiles, q_tiles = place // per, (members + per - 1) // per, kept[1]
        _gather(step, members, per, rows_ref, q_ref, queries_ref, *kept)
    lax.fori_loop(0, tiles, reset, None)
    first = first_place[0]

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

        def attend(tile: Array | int, positions_Q1: Array) -> None:
            sums = highest.at[tile], total.at[tile], summed.at[tile]
            _attend_to_block(span, positions_Q1, q_tiles.at[tile], keys_WX, values_WX, *sums)

        if not per:
            attend(0, positions_ref[0])
            return
        # What is read for all of a group all of them see; other rows' queries see nothing of this row's.
        is_common = (members > 0) & (block < blocks)
        positions_Q1 = jnp.where(is_common, width * count, positions_ref[0])
        tiles_from, tiles_to = jnp.where(is_common, 0, own), jnp.where(is_common, tiles, own + 1)
        lax.fori_loop(tiles_from, tiles_to, lambda each, _: attend(each, positions_Q1), None)

    lax.fori_loop(begin, count, add, None)
    first_place[0] = (first + count - begin) % 2
    for head in range(q_ref.shape[1]):
        y_QE = summed[own, head] / jnp.maximum(total[own, head, :, :1], 1.0)  # the highest score adds 1
        y_ref[0, head] = y_QE.astype(y_ref.dtype)


def _gather(
    step: Array,
    members: Array,
    per: int,
    rows_ref: Any,
    q_ref: Any,
    queries_ref: Any,
    copied: Any,
    tiles: Any,
    semaphores: Any,
) -> None:
    """Put the queries of the group that begins here together, ``per`` rows a tile; each row has a slot."""
    from jax.experimental.pallas import tpu as pltpu

    def copy(number: Array) -> Any:
        source = queries_ref.at[rows_ref[step + number]]
        return pltpu.make_async_copy(source, copied.at[number], semaphores.at[0])

    @pl.when(members == 1)
    def _() -> None:
        tiles[0] = q_ref[0]

    @pl.when(members > 1)
    def _() -> None:
        lax.fori_loop(0, members, lambda number, _: copy(number).start(), None)
        lax.fori_loop(0, members, lambda number, _: copy(number).wait(), None)

        def fill(tile: Array, _: None) -> None:
            def row(slot: int) -> Array:
                number = tile * per + slot
                q_KQE = copied[jnp.minimum(number, members - 1)].astype(jnp.float32)
                return jnp.where(number < members, q_KQE, 0.0)

            tiles[tile] = sum(map(row, range(1, per)), row(0)).astype(tiles.dtype)

        lax.fori_loop(0, (members + per - 1) // per, fill, None)


def _attend_to_block(
    span: tuple[Array, Array, Array, int],
    positions_Q1: Array,
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
    heads, queries, e = q_ref.shape
    width = keys_WX.shape[0]
    # A page's earlier owner may have left infinities, and zero times infinity is not zero.
    order_W1 = begin + lax.broadcasted_iota(jnp.int32, (width, 1), 0)
    is_there_W1 = (order_W1 <= last) & (order_W1 > before)
    values_WX = jnp.where(is_there_W1, values_WX, jnp.zeros_like(values_WX))
    order_QW = begin + lax.broadcasted_iota(jnp.int32, (queries, width), 1)
    is_seen_QW = order_QW <= positions_Q1
    if window:
        is_seen_QW &= order_QW > positions_Q1 - window
    for head in range(heads):
        mine = slice(head * e, (head + 1) * e)
        scores_QW = dot(q_ref[head], keys_WX[:, mine], 1, 1) * e**-0.5
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
