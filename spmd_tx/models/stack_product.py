"""The maps of a decode's layers with their adapters, read where the matrices of all layers are stacked.

XLA for GPUs copies a layer's matrix out of the stack before it multiplies, which moves it three times; XLA
for TPUs does not. The kernel splits the sum over a matrix's inputs into parts, so that narrow matrices, too,
occupy a whole GPU. How it is split follows from the shape of the matrix alone. No row changes a bit of
another one.

Dimension key as in lora.py; U part of the inputs, Q ranks of all slots.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float, Int

from spmd_tx.models.adapters.lora import ApplyLora, Lora
from spmd_tx.models.pallas import all_of, dot, output, power_in, run_triton

LEAST_ROWS, MOST_ROWS = 16, 384  # of a call; more rows are limited by arithmetic
BLOCK_ROWS = 128  # rows that a program computes
COLUMNS = 64  # that a program computes, if one block has all rows
DEPTH_BYTES = 128  # of a row of the input that it reads at once
LEAST_PART = 1024  # columns of the input: each part's sums are written, and read again to be added
PROGRAMS = 128  # that occupy a GPU
FEW = 8  # programs, if the sum were not split: then a part may be a quarter of LEAST_PART


class Tile(NamedTuple):
    """Holds how a program computes its rows and columns. It holds 96 KB of what it has read ahead."""

    columns: int
    warps: int
    ahead: int  # how many times DEPTH_BYTES of its rows and columns


# Every block reads all columns again, from the cache, and all columns read the block: so they are wider.
FEW_ROWS, MORE_ROWS = Tile(COLUMNS, 4, 4), Tile(2 * COLUMNS, 8, 3)

# (rows [B, I], stack [L, I, O], factors [L, S, R, ...], layer) -> [B, O]
StackedMap = Callable[[Array, Array, Lora[Array], Array], Array]


def reads_stack(shape: tuple[int, ...], rows: int) -> bool:
    """Say whether the kernel can multiply few rows by a stack [L, I, O]."""
    return rows <= MOST_ROWS and min(map(power_in, shape[1:])) >= LEAST_ROWS


def stack_product(
    x_BI: Float[Array, "B I"],
    w_LIO: Float[Array, "L _ _"],
    layer: Int[Array, ""],
    plus: tuple[Array, Array] | None = None,
    *,
    transposed: bool = False,
    interpret: bool = False,
) -> Float[Array, "B _"]:
    """Multiply rows by the matrix of a layer, with sums in fp32, on an NVIDIA GPU.

    With ``plus``, rows [B, Q] and a stack [L, Q, O], their product is added before anything is rounded. With
    ``transposed`` the stack is [L, O, I]. ``interpret`` is that of Kernels.
    """
    (count, depth), width = x_BI.shape, w_LIO.shape[1 if transposed else 2]
    rows = max(LEAST_ROWS, 1 << (count - 1).bit_length())
    rows = rows if rows <= BLOCK_ROWS else -(-count // BLOCK_ROWS) * BLOCK_ROWS
    block, tile = min(rows, BLOCK_ROWS), FEW_ROWS if rows <= BLOCK_ROWS else MORE_ROWS
    columns, most = min(tile.columns, power_in(width)), DEPTH_BYTES // x_BI.dtype.itemsize
    step = min(most, power_in(depth))
    parts = _parts(depth, step, width // min(COLUMNS, columns))  # whatever the number of rows
    blocks = (rows // BLOCK_ROWS,) if rows > BLOCK_ROWS else ()  # neighbours find their columns in the cache
    grid = (*blocks, width // columns, parts)
    dtype = x_BI.dtype if parts == 1 else jnp.float32
    arrays = [_padded(x_BI, rows), w_LIO]
    if plus is not None:
        arrays += [_padded(plus[0], rows), plus[1]]

    def kernel(layer_ref: Any, x_ref: Any, w_ref: Any, *refs: Any) -> None:
        (*plus_refs, y_ref), part = refs, pl.program_id(len(grid) - 1)
        layer, outputs = layer_ref[0], pl.ds(pl.program_id(len(grid) - 2) * columns, columns)

        def add(x_ref: Any, w_ref: Any, start: Any, step: int, number: Any, sum_BO: Array) -> Array:
            inputs = pl.ds(start + number * step, step)
            w = w_ref[(layer, outputs, inputs) if transposed else (layer, inputs, outputs)]
            return sum_BO + dot(x_ref[:, inputs], w, 1, int(transposed))

        turns, y_BO = depth // parts // step, jnp.zeros((block, columns), jnp.float32)
        y_BO = lax.fori_loop(0, turns, partial(add, x_ref, w_ref, part * (depth // parts), step), y_BO)
        if plus_refs:
            more = plus_refs[0].shape[1]
            its = min(most, power_in(more))
            turns = jnp.maximum(1 - part, 0) * (more // its)  # in the first part only
            y_BO = lax.fori_loop(jnp.int32(0), turns, partial(add, *plus_refs, 0, its), y_BO)
        y_ref[...] = y_BO.astype(y_ref.dtype)

    numbers = sum(array.size for array in arrays[::2]) + sum(array[0].size for array in arrays[1::2])
    moved = numbers * x_BI.dtype.itemsize + parts * rows * width * jnp.dtype(dtype).itemsize
    y_UBO = run_triton(
        kernel,
        (layer[None], *arrays),
        2 * rows * width * sum(x.shape[1] for x in arrays[::2]),
        moved,
        interpret=interpret,
        warps=tile.warps,
        stages=tile.ahead,
        out_shape=output((parts, rows, width), dtype, x_BI),
        grid=grid,
        in_specs=[all_of((1,)), *(_read(array.shape, block) for array in arrays)],
        out_specs=pl.BlockSpec((None, block, columns), lambda *at: (at[-1], _block(at), at[-2])),
        name="stack_product",
    )
    return jnp.sum(y_UBO, axis=0).astype(x_BI.dtype)[:count] if parts > 1 else y_UBO[0, :count]


def stacked_maps(
    slots_B: Int[Array, " B"], scale_S: Float[Array, " S"], apply_lora: ApplyLora, *, interpret: bool = False
) -> StackedMap:
    """Apply maps with their adapters [L, S, R, ...] to rows of one token, all of them read in place.

    As in lora.bank_lora, all adapters are applied to all rows, and another row's adapter adds exactly zero.
    Of adapters whose rank tensor cores do not have, ``apply_lora`` takes those of a layer.
    """
    gate_BS = slots_B[:, None] == jnp.arange(scale_S.shape[0])[None]
    times = partial(stack_product, interpret=interpret)

    def apply(x_BI: Array, w_LIO: Array, lora: Lora[Array], layer: Array) -> Array:
        if power_in(lora.a.shape[2]) < LEAST_ROWS:
            added_BO = apply_lora(x_BI[:, None], Lora(lora.a[layer], lora.b[layer]))[:, 0]
            return times(x_BI, w_LIO, layer) + added_BO
        a_LQI, b_LQO = (x.reshape(x.shape[0], -1, x.shape[3]) for x in (lora.a, lora.b))
        low_BQ = times(x_BI, a_LQI, layer, transposed=True)
        low_BSR = low_BQ.reshape(-1, *lora.a.shape[1:3]) * scale_S.astype(x_BI.dtype)[None, :, None]
        low_BSR = jnp.where(gate_BS[:, :, None], low_BSR, jnp.zeros((), x_BI.dtype))
        return times(x_BI, w_LIO, layer, (low_BSR.reshape(low_BQ.shape), b_LQO))

    return apply


def _padded(x_BI: Array, rows: int) -> Array:
    return jnp.pad(x_BI, ((0, rows - x_BI.shape[0]), (0, 0)))


def _read(shape: tuple[int, ...], block: int) -> pl.BlockSpec:
    """Return what a program may read of a stack, which is all of it, or of rows."""
    return all_of(shape) if len(shape) == 3 else pl.BlockSpec((block, shape[1]), lambda *at: (_block(at), 0))


def _block(at: tuple[Any, ...]) -> Any:
    """Return the block of rows of a program, from its place in the grid."""
    return at[0] if len(at) == 3 else 0


def _parts(depth: int, step: int, programs: int) -> int:
    """Return into how many parts the sum over the inputs is split."""
    most = min(power_in(depth // step), depth // (LEAST_PART if programs > FEW else LEAST_PART // 4))
    parts = 1
    while 2 * parts <= most and parts * programs < PROGRAMS:
        parts *= 2
    return parts
