"""Runs each expert over the tokens that chose it, with their rows' adapters, forward and backward.

Nothing is dropped: pairs of a token and an expert are computed chunk by chunk, as many as there are. The
backward pass computes the experts' intermediates again. Neither pass lets other rows decide how a row's
numbers are added: a token's experts are added in ascending order, and an adapter's gradient block after
block (layout.py).

Dimension key as in layout.py; P pair of a chunk, J pair of a block, N block of a chunk, D model width,
F feed-forward width, Q rank, I input width, O output width, L layer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from spmd_tx.hlo.hints import usual_turns
from spmd_tx.models.activations import gated
from spmd_tx.models.adapters.lora import Lora
from spmd_tx.models.checkpoint.packed import Matrix, decoded
from spmd_tx.models.experts.factor_sums import (
    Pieces,
    Spans,
    add_in_order,
    block_product,
    reads_in_place,
    spans,
    times,
)
from spmd_tx.models.experts.factors import Factors
from spmd_tx.models.experts.kernels import triton_sum
from spmd_tx.models.experts.layout import Layout, Tiling
from spmd_tx.models.experts.product import READS_PACKED, grouped_product, unset
from spmd_tx.models.experts.slot_product import slot_product
from spmd_tx.protocol.kernels import Kernels
from spmd_tx.sharding.collectives import varying
from spmd_tx.sharding.mesh import FSDP, TP

# gate [X, D, F], up [X, D, F], down [X, F, D]; or those of all layers [L, X, ...], and then the layout counts
# experts over all layers.
# Some models also have gate_bias and so on, [X, F] or [X, D].
Matrices = dict[str, Matrix]


@dataclass(frozen=True)
class Grouping:
    """Says how pairs are grouped and multiplied."""

    tiling: Tiling
    kernels: Kernels
    d_model: int
    width_out: int  # of results; columns behind those of factors.py are zeros
    activation: str = "silu"  # of activations.ACTIVATIONS
    in_place: bool = False  # whether factors are read as slot_product.py does


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def run_experts(
    how: Grouping,
    matrices: Matrices,
    lora: Factors,
    h_RTD: Array,
    weight_RTC: Array,
    scale_S: Array,
    place: Layout,
) -> Array:
    """Return the weighted sum [R, T, D] of each token's experts on this device. Matrices get no gradient.

    Inputs and outputs are wider where factors are shared (factors.py); inputs may have columns behind those.
    """
    matrices = _whole(how, matrices, h_RTD.dtype)
    pieces = _converted(_pieces(lora), h_RTD.dtype)
    chunk = partial(_chunk, how, matrices, h_RTD, weight_RTC, scale_S, place, pieces)

    def add(number: Array, y_WD: Array) -> Array:
        run, inputs, _ = chunk(number)
        return _put(y_WD, run(*inputs), number)

    y_WD = unset(how.kernels, (how.tiling.positions, how.width_out), h_RTD)
    return _sum_of_choices(how, _for_chunks(how, place, add, y_WD), place)


def _forward(how: Grouping, *arguments: Any) -> tuple[Array, Any]:
    return run_experts(how, *arguments), arguments


def _backward(how: Grouping, residuals: Any, slope_RTD: Array) -> tuple[Any, ...]:
    matrices, lora, h_RTD, weight_RTC, scale_S, place = residuals
    matrices, pieces = _whole(how, matrices, h_RTD.dtype), _pieces(lora)
    converted = _converted(pieces, h_RTD.dtype)
    chunk = partial(_chunk, how, matrices, h_RTD, weight_RTC, scale_S, place, converted)
    flat_slopes = slope_RTD.reshape(-1, slope_RTD.shape[2])

    def add(number: Array, carry: Any) -> Any:
        slopes_WD, slopes_W, sums = carry
        run, inputs, (token_P, is_pair_P) = chunk(number)
        slope_PD = jnp.where(is_pair_P[:, None], flat_slopes[token_P], 0)
        if how.kernels.platform == "cpu":  # whose chunks are one tile
            slopes, slope_P, parts = jax.vjp(run, *inputs)[1](slope_PD)
            blocks = how.tiling.chunk // how.tiling.block
            group_N = lax.dynamic_slice_in_dim(place.group_N, number * blocks, blocks)
            sums = add_in_order(sums, parts, group_N)
        else:
            slopes, slope_P, _, sums = jax.vjp(run, *inputs, sums)[1](slope_PD)
        return _put(slopes_WD, _joined(slopes, slopes_WD), number), _put(slopes_W, slope_P, number), sums

    width = how.tiling.positions
    # Like the slopes, which come when it is this layer's turn: XLA makes those that are like inputs earlier.
    slopes_WD = unset(how.kernels, (width, h_RTD.shape[2]), slope_RTD)
    slopes_W = varying(jnp.zeros(width, weight_RTC.dtype))
    sums = jax.tree.map(lambda x: jnp.zeros((x.shape[0] * x.shape[1], *x.shape[2:]), jnp.float32), pieces)
    carry = slopes_WD, slopes_W, jax.tree.map(varying, sums)
    slopes_WD, slopes_W, sums = _for_chunks(how, place, add, carry)
    sums = jax.tree.map(lambda x, total: total.reshape(x.shape).astype(x.dtype), pieces, sums)
    weights = jnp.where(place.place_RTC >= 0, slopes_W[jnp.maximum(place.place_RTC, 0)], 0)
    return None, _factors(sums), _sum_of_choices(how, slopes_WD, place), weights, None, None


run_experts.defvjp(_forward, _backward)


def _whole(how: Grouping, matrices: Matrices, dtype: DTypeLike) -> Matrices:
    """Gather matrices whose model width is split over fsdp, and decode those that the product cannot read.

    Both passes do, so that nothing whole is kept.
    """
    axes = {"gate": -2, "up": -2, "down": -1}  # of the model width

    def whole(name: str, matrix: Matrix) -> Matrix:
        if name in axes and matrix.shape[axes[name]] != how.d_model:
            gather = partial(lax.all_gather, axis_name=FSDP, axis=axes[name] % matrix.ndim, tiled=True)
            matrix = jax.tree.map(gather, matrix)
        return matrix if how.kernels.products in READS_PACKED else decoded(matrix, dtype)

    return {name: whole(name, matrix) for name, matrix in matrices.items()}


def _for_chunks(how: Grouping, place: Layout, turn: Callable[[Array, Any], Any], carry: Any) -> Any:
    """Run ``turn`` for every chunk in use. Devices may have different numbers of them."""
    if how.tiling.chunk == how.tiling.positions:
        return turn(jnp.int32(0), carry)
    count = (place.positions + how.tiling.chunk - 1) // how.tiling.chunk
    with jax.named_scope(usual_turns(how.tiling.usual_chunks)):
        return lax.fori_loop(0, count, turn, carry)


def _put(whole: Array, part: Array, number: Array) -> Array:
    return lax.dynamic_update_slice_in_dim(whole, part, number * part.shape[0], 0)


def _inputs(how: Grouping, pieces: Pieces, h_RTD: Array, token_P: Array, is_pair_P: Array) -> list[Array]:
    """Return of each pair x, and what shared factors of gate and up have made of it, if there are any.

    XLA for GPUs would copy the parts of whole rows for kernels, others take whole rows out faster.
    """
    flat_WD, widths = h_RTD.reshape(-1, h_RTD.shape[2]), [how.d_model]
    if "input" not in pieces:
        widths += [pieces["gate"].shape[-2]] * 2
    ends = list(accumulate(widths))
    if not how.kernels.has_gpu_products:
        x_PD = jnp.where(is_pair_P[:, None], flat_WD[token_P], 0)
        return jnp.split(x_PD, ends, axis=1)[: len(widths)]
    parts = (slice(end - width, end) for width, end in zip(widths, ends, strict=True))
    return [jnp.where(is_pair_P[:, None], flat_WD[token_P, part], 0) for part in parts]


def _joined(slopes: list[Array], whole: Array) -> Array:
    """Join the slopes of _inputs; those of the columns behind are zero."""
    behind = whole.shape[1] - sum(each.shape[1] for each in slopes)
    return jnp.pad(jnp.concatenate(slopes, axis=1), ((0, 0), (0, behind)))


def _chunk(
    how: Grouping,
    matrices: Matrices,
    h_RTD: Array,
    weight_RTC: Array,
    scale_S: Array,
    place: Layout,
    pieces: Pieces,
    number: Array,
) -> tuple[Callable[..., Array], tuple[list[Array], Array, Pieces], tuple[Array, Array]]:
    """Return the experts' function of a chunk, its arguments, and each pair's token and whether it is one."""
    size, blocks = how.tiling.chunk, how.tiling.chunk // how.tiling.block
    pair_P = lax.dynamic_slice_in_dim(place.pair_W, number * size, size)
    is_pair_P, pair_P = pair_P >= 0, jnp.maximum(pair_P, 0)
    token_P = pair_P // weight_RTC.shape[2]
    inputs = _inputs(how, pieces, h_RTD, token_P, is_pair_P)
    weight_P = jnp.where(is_pair_P, weight_RTC.reshape(-1)[pair_P], 0)
    expert_N, slot_N, group_N = (
        lax.dynamic_slice_in_dim(x, number * blocks, blocks)
        for x in (place.expert_N, place.slot_N, place.group_N)
    )
    by_group = reads_in_place(how.kernels, how.tiling.block, pieces)
    if not how.in_place:
        pieces = {name: x.reshape(-1, *x.shape[2:]) for name, x in pieces.items()}
        if not by_group:
            pieces = {name: x[group_N] for name, x in pieces.items()}
    scale_N, per_tile = scale_S[slot_N].astype(h_RTD.dtype), how.tiling.tile // how.tiling.block
    own_M = (group_N // scale_S.shape[0])[::per_tile]
    its = _Blocks(
        expert_N[::per_tile],
        own_M,
        slot_N,
        group_N if by_group else None,
        scale_N,
        spans(place, number * blocks, blocks),
    )
    run = partial(_run, how, matrices, its)
    return run, (inputs, weight_P, pieces), (token_P, is_pair_P)


@dataclass(frozen=True)
class _Blocks:
    """Says where the blocks of a chunk belong."""

    expert_M: Array  # of each tile, counted over all layers that are stacked
    own_M: Array  # the same, counted over one layer
    slot_N: Array
    group_N: Array | None  # where factors are those of groups, else each block has its own
    scale_N: Array
    of_groups: Spans


def _run(
    how: Grouping,
    matrices: Matrices,
    its: _Blocks,
    inputs: list[Array],
    weight_P: Array,
    pieces: Pieces,
    sums: Pieces | None = None,
) -> Array:
    """Return the experts' weighted results [P, D]; every pair's depend on its own numbers alone.

    Of ``sums`` only the derivative has a meaning (factor_sums.block_product).
    """
    blocks = its.scale_N.shape[0]

    def factored(x_NJI: Array, name: str, *, narrows: bool) -> Array:
        if how.in_place:
            where = its.slot_N, its.own_M
            return slot_product(how.kernels, narrows, x_NJI[:, 0], pieces[name], *where)[:, None]
        if sums is None:
            return times(how.kernels, narrows, x_NJI, pieces[name], its.group_N)
        return block_product(
            how.kernels, narrows, x_NJI, pieces[name], its.group_N, sums[name], its.of_groups
        )

    def low(x_PI: Array, name: str) -> Array:
        x_NJI = x_PI.reshape(blocks, -1, x_PI.shape[1])
        return factored(x_NJI, name, narrows=True) * its.scale_N[:, None, None]

    def linear(x_PI: Array, name: str, low_NJQ: Array) -> Array:
        added = factored(low_NJQ, name, narrows=False)
        base_PO = base(x_PI, name)
        return base_PO + added.reshape(base_PO.shape)

    def base(x_PI: Array, name: str) -> Array:
        experts = how.tiling.usual_experts(matrices[name].shape[-3])
        y_PO = cast(Array, grouped_product(how.kernels, x_PI, matrices[name], its.expert_M, False, experts))
        bias_XO = cast("Array | None", matrices.get(f"{name}_bias"))
        if bias_XO is None:
            return y_PO
        bias_MO = bias_XO.reshape(-1, y_PO.shape[1])[its.expert_M]
        bias_PO = jnp.repeat(bias_MO, y_PO.shape[0] // bias_MO.shape[0], axis=0)
        if name != "down":
            return y_PO + bias_PO
        is_first = lax.axis_index(TP) == 0  # of the devices whose results are summed
        return y_PO + jnp.where(is_first, bias_PO * weight_P[:, None], jnp.zeros((), y_PO.dtype))

    x_PD, *given = inputs
    if given:
        low_gate, low_up = (each.reshape(blocks, -1, each.shape[1]) for each in given)
    else:
        low_gate, low_up = jnp.split(low(x_PD, "input"), 2, axis=2)
    hidden_PF = gated(how.activation, linear(x_PD, "gate", low_gate), linear(x_PD, "up", low_up))
    hidden_PF *= weight_P[:, None]
    low_down = low(hidden_PF, "hidden")
    if "down" in pieces:
        return linear(hidden_PF, "down", low_down)
    y_PO = jnp.concatenate([base(hidden_PF, "down"), low_down.reshape(-1, low_down.shape[2])], axis=1)
    return jnp.pad(y_PO, ((0, 0), (0, how.width_out - y_PO.shape[1])))


def _pieces(lora: Factors) -> Pieces:
    """Join the two factors that take an expert's input, which is then read once."""
    if lora["gate"].a is None:
        return {"hidden": lora["down"].a, "gate": lora["gate"].b, "up": lora["up"].b}
    first = jnp.concatenate([lora["gate"].a, lora["up"].a], axis=2)
    return {"input": first, "hidden": lora["down"].a} | {name: factors.b for name, factors in lora.items()}


def _converted(pieces: Pieces, dtype: DTypeLike) -> Pieces:
    """Convert factors to the compute dtype: once, not in every chunk."""
    return {name: x.astype(dtype) for name, x in pieces.items()}


def _factors(pieces: Pieces) -> Factors:
    """Undo _pieces."""
    if "input" not in pieces:
        inner = {name: Lora(None, pieces[name]) for name in ("gate", "up")}
        return inner | {"down": Lora(pieces["hidden"], None)}
    gate, up = jnp.split(pieces["input"], 2, axis=2)
    inputs = {"gate": gate, "up": up, "down": pieces["hidden"]}
    return {name: Lora(a, pieces[name]) for name, a in inputs.items()}


def _sum_of_choices(how: Grouping, y_WD: Array, place: Layout) -> Array:
    """Add what stands at the places of each token's pairs, in their order and in fp32."""
    if how.kernels.has_gpu_products:
        place_TC = place.place_RTC.reshape(-1, place.place_RTC.shape[2])
        total_TD = triton_sum(y_WD, place_TC, how.tiling.usual_pairs, how.kernels.interpret)
        return total_TD.reshape(*place.place_RTC.shape[:2], -1)
    found = [
        y_WD[jnp.maximum(place.place_RTC[:, :, choice], 0)] for choice in range(place.place_RTC.shape[2])
    ]
    if how.kernels.platform == "tpu":
        # Otherwise a TPU writes each of them once more, in fp32, before it adds.
        found = lax.optimization_barrier(found)
    total_RTD: Array | float = 0.0
    for choice, y_RTD in enumerate(found):
        is_pair_RT1 = (place.place_RTC[:, :, choice] >= 0)[..., None]
        total_RTD += jnp.where(is_pair_RT1, y_RTD.astype(jnp.float32), 0.0)
    return jnp.asarray(total_RTD).astype(y_WD.dtype)
