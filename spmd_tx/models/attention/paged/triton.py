"""Attention to the pages of rows on NVIDIA GPUs, as a Pallas kernel for Triton.

The pages of a row that has one query are split into parts of equal size, so that few long rows, too, fill a
GPU, and their results are combined (flash decoding, Dao et al. 2023; combine.py). The row's own tokens decide
how many parts there are: how a sum is split follows from the row alone. Heads are read in columns of powers
of two, as Triton wants them: the 576 of latent attention, whose pages are keys and values alike, as 512 and
64.

Dimension key as in queries.py; Q queries of a program, W tokens read at once, U part, H columns of a head.
"""

import math
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float, Int

from spmd_tx.models.attention.page_loop import USUAL_TOKENS, Pools
from spmd_tx.models.attention.paged.combine import Found, combined
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


def attend(
    q_BTNE: Float[Array, "B T N E"],
    pools: Pools,
    index: Array,
    tables_BN: Int[Array, "B _"],
    positions_BT: Int[Array, "B T"],
    *,
    interpret: bool = False,
    sinks_N: Float[Array, " N"] | None = None,
    window: int = 0,
) -> Float[Array, "B T N E"]:
    """Attend from all tokens of a row to the tokens up to their positions; sinks as a part of their own."""
    b, t, n, e = q_BTNE.shape
    page_size, heads = pools[0].shape[2], pools[0].shape[3] // e
    group, parts = n // heads, PARTS if t == 1 else 1
    share = 2 if e > WIDE else 1
    queries = _power_of_two(min(t * group, SEVERAL_QUERIES // share), LEAST)
    pages = max(1, MOST_TOKENS // share // page_size)
    tables_BN = jnp.pad(tables_BN, ((0, 0), (0, -tables_BN.shape[1] % pages)))
    q_BKRE = by_head(q_BTNE, heads, queries)
    positions_BR = positions_by_head(positions_BT, group, queries)
    programs = q_BKRE.shape[2] // queries  # of a part
    kept = queries if parts == 1 else min(queries, _power_of_two(group, 1))  # the others were put in
    of_parts = (parts, b, heads, programs * kept)
    own = [pool for pool in pools if pool is not None]
    cost = estimate(q_BTNE, own, tables_BN.shape[1] * page_size, window)
    least = LEAST_PART * share
    split = partial(_split, parts, pages * page_size, least, window)
    whole = [jnp.atleast_1d(index), tables_BN, positions_BR, q_BKRE, *own]
    shapes = [(of_parts, jnp.float32), (of_parts, jnp.float32), ((*of_parts, e), jnp.float32)]
    usual_tokens = min(USUAL_TOKENS, tables_BN.shape[1] * page_size, window or USUAL_TOKENS)
    usual_parts = max(1, min(parts, -(-usual_tokens // least)))
    # XLA keeps no estimate of Triton's calls. Queries are read; of the results it tells, not what is written.
    written = usual_parts * sum(math.prod(shape[1:]) * 4 for shape, _ in shapes)
    moved = cost.bytes_accessed - q_BTNE.size * q_BTNE.dtype.itemsize + written
    found = run_triton(
        _kernel(pages, parts, queries, kept, window, split),
        whole,
        cost.flops,
        moved,
        interpret=interpret,
        warps=4 if queries * share < SEVERAL_QUERIES else 8,
        stages=2,
        out_shape=[output(shape, dtype, q_BKRE) for shape, dtype in shapes],
        grid=(programs * parts, heads, b),
        name="paged_attention",
    )
    sinks_KR = None if sinks_N is None else sinks_by_head(sinks_N, heads, programs * kept)
    if parts == 1:
        return by_token(_normalised(found, sinks_KR).astype(q_BTNE.dtype), t, group)
    used_B = split(positions_BT[:, 0], positions_BT[:, 0] - window)[2]
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


def _split(
    parts: int, width: int, least_part: int, window: int, last: Array, before: Array
) -> tuple[Array, Array, Array]:
    """Return the first block of ``width`` tokens, the one behind the last, and how many parts they make.

    A part has ``least_part`` tokens or more. ``last`` is a row's last position, -1 if nobody reads it; in a
    window nothing is seen up to ``before``.
    """
    end = (last + width) // width
    first = jnp.maximum(before + 1, 0) // width if window else jnp.zeros_like(end)
    least = max(1, least_part // width)
    return first, end, jnp.minimum(jnp.maximum((end - first + least - 1) // least, 1), parts)


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


def _kernel(block_pages: int, parts: int, queries: int, kept: int, window: int, split: Any) -> Any:
    def kernel(
        index_ref: Any, tables_ref: Any, positions_ref: Any, q_ref: Any, keys_ref: Any, *others: Any
    ) -> None:
        *values_ref, highest_ref, total_ref, sum_ref = others  # without values, the keys are the values, too
        number, head, row = pl.program_id(0), pl.program_id(1), pl.program_id(2)
        part, mine = number % parts, pl.ds(number // parts * queries, queries)
        e, page_size = q_ref.shape[3], keys_ref.shape[2]
        width, ranges = block_pages * page_size, powers_of_two(e)
        index, positions_Q = index_ref[0], positions_ref[row, mine]
        qs_QH = [q_ref[row, head, mine, pl.ds(begin, size)] for begin, size in ranges]
        last = jnp.max(positions_Q)
        # Before the window of the first query nothing is seen.
        before = jnp.min(jnp.where(positions_Q < 0, last, positions_Q)) - window
        begin, count, used = split(last, before)
        each = (count - begin + used - 1) // used

        def read(ref: Any, pages: Array) -> list[Array]:
            at = head * e
            return [
                ref[index, pages, :, pl.ds(at + begin, size)].reshape(width, size) for begin, size in ranges
            ]

        def add(block: Array, carry: tuple[Array, Array, list[Array]]) -> tuple[Array, Array, list[Array]]:
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
        its = part, row, head, pl.ds(number // parts * kept, kept)

        @pl.when(part < used)
        def _() -> None:
            highest_ref[its] = _first(highest_Q, kept)
            total_ref[its] = _first(total_Q, kept)
            for (begin, size), sum_QH in zip(ranges, sums_QH, strict=True):
                sum_ref[*its, pl.ds(begin, size)] = _first(sum_QH, kept)

    return kernel


def _first(x_Q: Array, count: int) -> Array:
    """Return the first entries, a power of two. A kernel cannot take slices of what it holds."""
    if x_Q.shape[0] == count:
        return x_Q
    parts = x_Q.reshape(-1, count, *x_Q.shape[1:])
    is_first = jnp.arange(parts.shape[0]).reshape(-1, *[1] * x_Q.ndim) == 0
    return jnp.sum(jnp.where(is_first, parts, jnp.zeros((), x_Q.dtype)), axis=0)
