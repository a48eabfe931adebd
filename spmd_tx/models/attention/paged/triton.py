"""Attention to the pages of rows on NVIDIA GPUs, as a Pallas kernel for Triton.

The pages of a row that has one query are split into parts of equal size, so that few long rows, too, fill a
GPU, and their results are combined (flash decoding, Dao et al. 2023; combine.py). The row's own tokens decide
how many parts there are: how a sum is split follows from the row alone. Heads are read in columns of powers
of two, as Triton wants them: the 576 of latent attention, whose pages are keys and values alike, as 512 and
64.

Dimension key as in queries.py; Q queries of a program, W tokens read at once, U part, H columns of a head.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float, Int

from spmd_tx.models.attention.page_loop import USUAL_TOKENS, Pools
from spmd_tx.models.attention.paged.combine import Found, combined
from spmd_tx.models.attention.paged.parts import CommonParts, RowParts, shared_parts
from spmd_tx.models.attention.paged.queries import (
    LOWEST,
    by_head,
    by_token,
    estimate,
    positions_by_head,
    sinks_by_head,
)
from spmd_tx.models.pallas import dot, output, powers_of_two, run_triton

LEAST = 16  # rows and columns of a product on tensor cores
WIDE = 256  # heads beyond this many columns leave room for half the queries and tokens
SEVERAL_QUERIES = 64  # of a program, where a row has several tokens
MOST_TOKENS = 64  # read at once
PARTS = 8  # at most, of a row's pages, where it has one token
LEAST_PART = 256  # tokens, twice as many of wide heads: what smaller parts save, their results add
MOST_ROWS = 16  # that a program reads a part for, one tile of queries after the other
ROOM = 256  # heads of all rows that fill a GPU: with twice as many, a program may have two tiles


def attend(
    q_BTNE: Float[Array, "B T N E"],
    pools: Pools,
    index: Array,
    tables_BN: Int[Array, "B _"],
    positions_BT: Int[Array, "B T"],
    *,
    interpret: bool = False,
    shared: CommonParts | None = None,
    sinks_N: Float[Array, " N"] | None = None,
    window: int = 0,
) -> Float[Array, "B T N E"]:
    """Attend from all tokens of a row to the tokens up to their positions; sinks as a part of their own.

    ``shared`` is that of ``sharing``; None: rows read their pages alone.
    """
    b, t, n, e = q_BTNE.shape
    page_size, heads = pools[0].shape[2], pools[0].shape[3] // e
    group = n // heads
    queries, kept = _tile(t, group, e)
    parts = _parts(t, e, page_size, tables_BN.shape[1], window)
    tables_BN = jnp.pad(tables_BN, ((0, 0), (0, -tables_BN.shape[1] % (parts.block // page_size))))
    q_BKRE = by_head(q_BTNE, heads, kept)
    positions_BR = positions_by_head(positions_BT, group, kept)
    programs = q_BKRE.shape[2] // kept  # of a part
    together: list[Array] = []
    if shared is not None:
        assert shared.rows.shape[2] % (queries // kept) == 0, "rows come in whole tiles"
        together = [shared.rows, shared.counts]
    of_parts = (parts.most, b, heads, programs * kept)
    own = [pool for pool in pools if pool is not None]
    cost = estimate(q_BTNE, own, tables_BN.shape[1] * page_size, window, [q_BTNE])
    whole = [jnp.atleast_1d(index), tables_BN, positions_BR, *together, q_BKRE, *own]
    shapes = [(of_parts, jnp.float32), (of_parts, jnp.float32), ((*of_parts, e), jnp.float32)]
    usual_tokens = min(USUAL_TOKENS, tables_BN.shape[1] * page_size, window or USUAL_TOKENS)
    usual_parts = max(1, min(parts.most, -(-usual_tokens // (parts.least * parts.block))))
    # XLA keeps no estimate of Triton's calls. Of the results it tells, not what is written.
    written = usual_parts * sum(math.prod(shape[1:]) * 4 for shape, _ in shapes)
    found = run_triton(
        _kernel(parts, queries, kept, bool(together)),
        whole,
        cost.flops,
        cost.bytes_accessed + written,
        interpret=interpret,
        warps=4 if queries * (2 if e > WIDE else 1) < SEVERAL_QUERIES else 8,
        stages=2,
        out_shape=[output(shape, dtype, q_BKRE) for shape, dtype in shapes],
        grid=(programs * parts.most, heads, b),
        name="paged_attention",
    )
    sinks_KR = None if sinks_N is None else sinks_by_head(sinks_N, heads, programs * kept)
    if t > 1:
        return by_token(_normalised(found, sinks_KR).astype(q_BTNE.dtype), t, group)
    *_, used_B = parts.of(positions_BT[:, 0], positions_BT[:, 0] - window)
    y_BKRE = combined(
        found,
        used_B,
        sinks_KR,
        queries=kept,
        ranges=powers_of_two(e),
        dtype=q_BTNE.dtype,
        usual_parts=usual_parts,
        interpret=interpret,
    )
    return by_token(y_BKRE, t, group)


def sharing(
    q_shape: tuple[int, int, int], pool: Array, tables_BN: Int[Array, "B N"], lasts_B: Int[Array, " B"]
) -> CommonParts | None:
    """Find which rows of one token, whose queries are [B, N, E], read their pages together; None: no rows do.

    ``lasts_B`` are the rows' last positions, -1 where nobody reads a row; layers must have no window. Few
    rows stay in more programs than would need be, so that they fill a GPU.
    """
    b, n, e = q_shape
    heads = pool.shape[3] // e
    queries, kept = _tile(1, n // heads, e)
    tiles = 1 << max(b * heads // ROOM, 1).bit_length() - 1
    most = min(queries // kept * tiles, max(MOST_ROWS, queries // kept))
    if most == 1:
        return None
    return shared_parts(
        _parts(1, e, pool.shape[2], tables_BN.shape[1], 0), pool.shape[2], tables_BN, lasts_B, most
    )


def _tile(tokens: int, group: int, width: int) -> tuple[int, int]:
    """Return the queries of a product, and how many of them are one row's: the others are other rows'."""
    queries = _power_of_two(min(tokens * group, SEVERAL_QUERIES // (2 if width > WIDE else 1)), LEAST)
    return queries, queries if tokens > 1 else min(queries, _power_of_two(group, 1))


def _parts(tokens: int, width: int, page_size: int, table: int, window: int) -> RowParts:
    """Return how rows of so many new tokens and pages are divided."""
    share = 2 if width > WIDE else 1
    block = max(1, MOST_TOKENS // share // page_size) * page_size
    most, least = (PARTS, max(1, LEAST_PART * share // block)) if tokens == 1 else (1, 1)
    return RowParts(most, block, least, -(-table * page_size // block), window)


def _normalised(found: Found, sinks_KR: Array | None) -> Array:
    """Divide sums of one part by their totals."""
    highest_BKR, total_BKR, sum_BKRE = (x[0] for x in found)
    if sinks_KR is not None:
        most_BKR = jnp.maximum(highest_BKR, sinks_KR[None])
        share_BKR = jnp.exp(highest_BKR - most_BKR)
        total_BKR = total_BKR * share_BKR + jnp.exp(sinks_KR[None] - most_BKR)
        sum_BKRE = sum_BKRE * share_BKR[..., None]
    return sum_BKRE / jnp.maximum(total_BKR, 1.0)[..., None]  # the highest score adds 1


def fits(head_dim: int, page_size: int) -> bool:
    """Return whether the kernel can have heads of this width and pages of so many tokens."""
    tokens = MOST_TOKENS if head_dim <= WIDE else MOST_TOKENS // 2
    narrowest = powers_of_two(head_dim)[-1][1]
    return narrowest >= LEAST and page_size <= tokens and page_size & (page_size - 1) == 0


def _power_of_two(count: int, least: int) -> int:
    """Return the first power of two from ``least``, which is one, that is not below ``count``."""
    return max(least, 1 << (count - 1).bit_length())


def _kernel(parts: RowParts, queries: int, kept: int, is_shared: bool) -> Any:
    width, window, per = parts.block, parts.window, queries // kept

    def kernel(index_ref: Any, tables_ref: Any, positions_ref: Any, *others: Any) -> None:
        together, others = (others[:2], others[2:]) if is_shared else ((), others)
        # Without values, the keys are the values, too.
        q_ref, keys_ref, *values_ref, highest_ref, total_ref, sum_ref = others
        number, head, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        part, mine = number % parts.most, pl.ds(number // parts.most * kept, kept)
        e, page_size = q_ref.shape[3], keys_ref.shape[2]
        block_pages, ranges, index = width // page_size, powers_of_two(e), index_ref[0]

        def read(ref: Any, pages: Array) -> list[Array]:
            at = head * e
            return [
                ref[index, pages, :, pl.ds(at + begin, size)].reshape(width, size) for begin, size in ranges
            ]

        def tile(rows_M: Array) -> None:
            positions_Q = positions_ref[rows_M, mine].reshape(queries)
            qs_QH = [
                q_ref[rows_M, head, mine, pl.ds(begin, size)].reshape(queries, size) for begin, size in ranges
            ]
            last = jnp.max(positions_Q)
            # Before the window of the first query nothing is seen.
            before = jnp.min(jnp.where(positions_Q < 0, last, positions_Q)) - window
            begin, count, each, used = parts.of(last, before)

            def add(
                block: Array, carry: tuple[Array, Array, list[Array]]
            ) -> tuple[Array, Array, list[Array]]:
                highest_Q, total_Q, sums_QH = carry
                pages = tables_ref[row, pl.ds(block * block_pages, block_pages)]
                order_W = block * width + jnp.arange(width, dtype=jnp.int32)
                is_there_W, is_seen_QW = order_W <= last, order_W[None] <= positions_Q[:, None]
                if window:
                    is_there_W &= order_W > before
                    is_seen_QW &= order_W[None] > positions_Q[:, None] - window
                keys_WH = read(keys_ref, pages)
                # A page's earlier owner may have left infinities, and zero times infinity is not zero.
                values_WH = [
                    jnp.where(is_there_W[:, None], values, jnp.zeros_like(values))
                    for values in (read(values_ref[0], pages) if values_ref else keys_WH)
                ]
                scores_QW = sum(dot(q, keys, 1, 1) for q, keys in zip(qs_QH, keys_WH, strict=True))
                scores_QW = jnp.where(is_seen_QW, scores_QW * e**-0.5, LOWEST)
                new_Q = jnp.maximum(highest_Q, jnp.max(scores_QW, axis=1))
                scale_Q = jnp.exp(highest_Q - new_Q)
                shares_QW = jnp.where(is_seen_QW, jnp.exp(scores_QW - new_Q[:, None]), 0.0)
                total_Q = total_Q * scale_Q + jnp.sum(shares_QW, axis=1)
                sums_QH = [
                    so_far * scale_Q[:, None] + dot(shares_QW.astype(values.dtype), values)
                    for so_far, values in zip(sums_QH, values_WH, strict=True)
                ]
                return new_Q, total_Q, sums_QH

            nothing_Q = jnp.zeros((queries,), jnp.float32)
            nothing_QH = [jnp.zeros((queries, size), jnp.float32) for _, size in ranges]
            first = begin + part * each
            start = nothing_Q + LOWEST, nothing_Q, nothing_QH
            highest_Q, total_Q, sums_QH = lax.fori_loop(first, jnp.minimum(count, first + each), add, start)
            its = part, rows_M, head, mine

            @pl.when(part < used)
            def _() -> None:
                highest_ref[its] = highest_Q.reshape(per, kept)
                total_ref[its] = total_Q.reshape(per, kept)
                for (begin, size), sum_QH in zip(ranges, sums_QH, strict=True):
                    sum_ref[*its, pl.ds(begin, size)] = sum_QH.reshape(per, kept, size)

        if not together:
            tile(jnp.full((per,), row))
            return
        rows_ref, counts_ref = together

        def tile_of(number: Array, _: None) -> None:
            tile(rows_ref[row, part, pl.ds(number * per, per)])

        lax.fori_loop(0, (counts_ref[row, part] + per - 1) // per, tile_of, None)

    return kernel
