"""The product of a decode's rows with a layer's matrix, read where the matrices of all layers are stacked.

XLA for GPUs copies a layer's matrix out of the stack before it multiplies, which moves it three times; XLA
for TPUs does not. The kernel splits the sum over a matrix's inputs into parts, so that narrow matrices, too,
occupy a whole GPU. How it is split follows from the shape of the matrix alone. No row changes a bit of
another one.

Dimension key: B row, L layer, I input width, O output width, U part of the inputs.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float, Int

from spmd_tx.hlo.hints import costs

INTERPRET = False  # whether the kernel runs as a plain XLA program, in tests
LEAST_ROWS, MOST_ROWS = 16, 128  # of a program; more rows are limited by arithmetic
COLUMNS = 64  # that a program computes
DEPTH_BYTES = 128  # of a row of the input that it reads at once, four times ahead: 96 KB for 128 rows
LEAST_PART = 1024  # columns of the input: each part's sums are written, and read again to be added
PROGRAMS = 128  # that occupy a GPU


def reads_stack(product: str, shape: tuple[int, ...], rows: int) -> bool:
    """Say whether few rows are multiplied in place by a stack [L, I, O], by the product of the experts."""
    _, depth, width = shape
    return product == "triton" and rows <= MOST_ROWS and min(_power(depth), _power(width)) >= LEAST_ROWS


def stack_product(
    x_BI: Float[Array, "B I"], w_LIO: Float[Array, "L I O"], layer: Int[Array, ""]
) -> Float[Array, "B O"]:
    """Multiply rows by the matrix of a layer, with sums in fp32, on an NVIDIA GPU."""
    from jax.experimental.pallas import triton as plgpu

    (count, depth), width = x_BI.shape, w_LIO.shape[2]
    rows = max(LEAST_ROWS, 1 << (count - 1).bit_length())
    x_BI = jnp.pad(x_BI, ((0, rows - count), (0, 0)))
    columns = min(COLUMNS, _power(width))
    step = min(DEPTH_BYTES // x_BI.dtype.itemsize, _power(depth))
    parts = _parts(depth, step, width // columns)
    dtype = x_BI.dtype if parts == 1 else jnp.float32
    precision = lax.Precision.HIGHEST if x_BI.dtype == jnp.float32 else None

    def kernel(layer_ref: Any, x_ref: Any, w_ref: Any, y_ref: Any) -> None:
        layer, start = layer_ref[0], pl.program_id(1) * (depth // parts)
        outputs = pl.ds(pl.program_id(0) * columns, columns)

        def add(number: Any, sum_BO: Array) -> Array:
            inputs = pl.ds(start + number * step, step)
            w_IO = w_ref[layer, inputs, outputs]
            return sum_BO + jnp.dot(
                x_ref[:, inputs], w_IO, precision=precision, preferred_element_type=jnp.float32
            )

        turns = depth // parts // step
        y_BO = lax.fori_loop(0, turns, add, jnp.zeros((rows, columns), jnp.float32))
        y_ref[...] = y_BO.astype(y_ref.dtype)

    like = jax.typeof(x_BI).manual_axis_type
    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((parts, rows, width), dtype, manual_axis_type=like),
        grid=(width // columns, parts),
        in_specs=[
            pl.BlockSpec((1,), lambda column, part: (0,)),
            pl.BlockSpec((rows, depth), lambda column, part: (0, 0)),
            pl.BlockSpec(w_LIO.shape, lambda column, part: (0, 0, 0)),
        ],
        out_specs=pl.BlockSpec((None, rows, columns), lambda column, part: (part, 0, column)),
        compiler_params=None if INTERPRET else plgpu.CompilerParams(num_warps=4, num_stages=4),
        interpret=INTERPRET,
        name="stack_product",
    )
    item = x_BI.dtype.itemsize
    moved = (depth * width + rows * depth) * item + parts * rows * width * jnp.dtype(dtype).itemsize
    with jax.named_scope(costs(2 * rows * depth * width, moved)):
        y_UBO = call(layer[None], x_BI, w_LIO)
    return jnp.sum(y_UBO, axis=0).astype(x_BI.dtype)[:count] if parts > 1 else y_UBO[0, :count]


def _power(size: int) -> int:
    """Return the largest power of two that divides a size."""
    return size & -size


def _parts(depth: int, step: int, programs: int) -> int:
    """Return into how many parts the sum over the inputs is split."""
    most = min(_power(depth // step), depth // LEAST_PART)
    parts = 1
    while 2 * parts <= most and parts * programs < PROGRAMS:
        parts *= 2
    return parts
