"""Adds the gradients of the factors that experts have of their own, over the pairs of each group.

A group's blocks are added one after the other in fp32, so that neither other groups nor the ends of chunks
decide how its sum is taken. CPUs add the gradients of a tile's blocks. Accelerators take many blocks at once:
``block_product`` adds while it differentiates, on GPUs by a kernel that writes no block's gradient.

Dimension key as in grouped.py; G group of layout.py, K pair of one product of tensor cores.
"""

from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from spmd_tx.hlo.hints import usual_turns
from spmd_tx.models.experts.layout import Layout
from spmd_tx.models.experts.product import grouped_product
from spmd_tx.models.pallas import all_of, dot, output, power_in, run_triton
from spmd_tx.protocol.kernels import Kernels

TOGETHER = 8  # blocks of a group that XLA adds in one turn of the loop
LEAST = 16  # rows and columns of a product that tensor cores have
RANKS, COLUMNS = 64, 128  # at most, of the part of a sum that one program of a GPU adds up

# Factors [X, S, Q, I], of which those of gate and up that take the input are one, or parts or sums of them.
Pieces = dict[str, Array]
Spans = tuple[Array, Array]  # the first block of each group in this chunk, and the block after its last


def spans(place: Layout, first: Array, blocks: int) -> Spans:
    """Return which of the ``blocks`` blocks from ``first`` on are those of each group."""
    start_G = place.first_G - first
    return jnp.clip(start_G, 0, blocks), jnp.clip(start_G + place.count_G, 0, blocks)


def add_in_order(sums: Pieces, parts: Pieces, group_N: Array) -> Pieces:
    """Add gradients [N, ...] one after the other. For CPUs: nothing but the sums' own entries moves."""

    def add(block: Array, sums: Pieces) -> Pieces:
        return jax.tree.map(lambda total, part: total.at[group_N[block]].add(part[block]), sums, parts)

    parts = jax.tree.map(lambda part: part.astype(jnp.float32), parts)
    return lax.fori_loop(0, group_N.shape[0], add, sums)


def reads_in_place(kernels: Kernels, block: int, pieces: Pieces) -> bool:
    """Say whether blocks are multiplied by the factors of their groups where these stand, without copies."""
    widths = (power_in(width) for factor in pieces.values() for width in factor.shape[-2:])
    return kernels.has_gpu_products and min(block, *widths) >= LEAST


def times(kernels: Kernels, narrows: bool, x_NJI: Array, factor: Array, group_N: Array | None) -> Array:
    """Multiply blocks by their factors: to their rank with ``narrows``, else from it ([_, Q, O]).

    The factors are those of each block, or with ``group_N`` of each group.
    """
    if group_N is None:
        return jnp.einsum("NJI,NQI->NJQ" if narrows else "NJQ,NQO->NJO", x_NJI, factor)
    x_PI = x_NJI.reshape(-1, x_NJI.shape[2])
    y_PO = cast(Array, grouped_product(kernels, x_PI, factor, group_N, narrows))
    return y_PO.reshape(*x_NJI.shape[:2], -1)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def block_product(
    kernels: Kernels,
    narrows: bool,
    x_NJI: Array,
    factor: Array,
    group_N: Array | None,
    sums_GQI: Array,
    spans: Spans,
) -> Array:
    """Return what ``times`` does.

    ``sums`` takes no part. Its derivative are these sums with the factors' gradients added, while that of
    the factors themselves is zero.
    """
    return times(kernels, narrows, x_NJI, factor, group_N)


def _forward(kernels: Kernels, narrows: bool, *arguments: Any) -> tuple[Array, Any]:
    return block_product(kernels, narrows, *arguments), arguments


def _backward(kernels: Kernels, narrows: bool, residuals: Any, slope_NJO: Array) -> tuple[Any, ...]:
    x_NJI, factor, group_N, sums_GQI, spans = residuals
    low, wide = (slope_NJO, x_NJI) if narrows else (x_NJI, slope_NJO)
    sums_GQI = add_by_group(kernels, sums_GQI, low, wide, spans)
    return times(kernels, not narrows, slope_NJO, factor, group_N), None, None, sums_GQI, None


block_product.defvjp(_forward, _backward)


def add_by_group(kernels: Kernels, sums_GQI: Array, low_NJQ: Array, wide_NJI: Array, spans: Spans) -> Array:
    """Add each block's product of ranks and widths to its group's sum, fp32."""
    is_kernel = kernels.has_gpu_products and _columns(wide_NJI) >= LEAST
    run = partial(_triton, kernels.interpret) if is_kernel else _xla
    return run(sums_GQI, low_NJQ, wide_NJI, spans)


def _xla(sums_GQI: Array, low_NJQ: Array, wide_NJI: Array, spans: Spans) -> Array:
    """Add to all groups at once, some blocks of each in every turn."""
    part_NQI = jnp.einsum("NJQ,NJI->NQI", low_NJQ, wide_NJI)
    first_G, end_G = spans
    blocks = part_NQI.shape[0]

    def add(turn: Array, sums_GQI: Array) -> Array:
        for place_in_turn in range(TOGETHER):
            block_G = first_G + turn * TOGETHER + place_in_turn
            is_its_G, block_G = block_G < end_G, jnp.minimum(block_G, blocks - 1)
            part_GQI = part_NQI[block_G].astype(jnp.float32)
            sums_GQI += jnp.where(is_its_G[:, None, None], part_GQI, 0.0)
        return sums_GQI

    turns = (jnp.max(end_G - first_G) + TOGETHER - 1) // TOGETHER
    equal_share = -(-blocks // first_G.size)
    with jax.named_scope(usual_turns(-(-equal_share // TOGETHER))):
        return lax.fori_loop(0, turns, add, sums_GQI)


def _columns(wide_NJI: Array) -> int:
    """Return how many columns of a sum a program of a GPU adds up: a power of two."""
    return min(COLUMNS, power_in(wide_NJI.shape[2]))


def _triton(interpret: bool, sums_GQI: Array, low_NJQ: Array, wide_NJI: Array, spans: Spans) -> Array:
    """Add on NVIDIA GPUs: each program a part of one group's sum, block by block."""
    block, used = low_NJQ.shape[1:]
    spare = -used % LEAST
    low_NJQ = jnp.pad(low_NJQ, ((0, 0), (0, 0), (0, spare)))
    sums_GQI = jnp.pad(sums_GQI, ((0, 0), (0, spare), (0, 0)))
    low_PQ, wide_PI = (x.reshape(-1, x.shape[2]) for x in (low_NJQ, wide_NJI))
    groups, rank, width = sums_GQI.shape
    ranks, columns, pairs = min(RANKS, power_in(rank)), _columns(wide_NJI), max(LEAST, block)

    def kernel(first_ref: Any, end_ref: Any, low_ref: Any, wide_ref: Any, sum_ref: Any, out_ref: Any) -> None:
        group, its_ranks = pl.program_id(2), pl.ds(pl.program_id(1) * ranks, ranks)
        its_columns = pl.ds(pl.program_id(0) * columns, columns)
        # Tensor cores take more pairs than a block may have. The last one then stands for those that are not.
        pair_K = jnp.arange(pairs)
        is_pair_K1 = (pair_K < block)[:, None]
        pair_K = jnp.minimum(pair_K, block - 1)

        def add(number: Any, sum_QI: Array) -> Array:
            low_KQ = low_ref[number * block + pair_K, its_ranks]
            low_KQ = jnp.where(is_pair_K1, low_KQ, jnp.zeros((), low_KQ.dtype))
            return sum_QI + dot(low_KQ.T, wide_ref[number * block + pair_K, its_columns])

        out_ref[...] = lax.fori_loop(first_ref[group], end_ref[group], add, sum_ref[...])

    part = pl.BlockSpec((None, ranks, columns), lambda column, its, group: (group, its, column))
    moved = (low_PQ.size + wide_PI.size) * wide_PI.dtype.itemsize + 2 * sums_GQI.nbytes
    sums_GQI = run_triton(
        kernel,
        (*spans, low_PQ, wide_PI, sums_GQI),
        2 * low_PQ.size * width,
        moved,
        interpret=interpret,
        warps=4,
        stages=3,
        out_shape=output(sums_GQI.shape, jnp.float32, wide_PI),
        grid=(width // columns, rank // ranks, groups),
        in_specs=[*(all_of(x.shape) for x in (*spans, low_PQ, wide_PI)), part],
        out_specs=part,
        input_output_aliases={4: 0},
        name="factor_sums",
    )
    return sums_GQI[:, :used]
