"""Pallas kernels of the grouped product: each tile of rows times the matrix of its expert.

Every tile is computed in the same way whatever the others hold, and the whole sum of a row is taken in one
order, so that neither a row's place nor its company can change a bit.

``experts`` is how many of the matrices one product usually takes; there are more if they are of several
layers. ``interpret`` is that of Kernels. Dimension key as in product.py.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from spmd_tx.hlo.hints import COUNTS_ARRAYS, costs
from spmd_tx.models.checkpoint.packed import Matrix, Packed, rounded, scale_values, values
from spmd_tx.models.pallas import all_of, dot, output, power_in, powers_of_two, run_on_gpu, run_triton

MATRIX_BYTES = 4 << 20  # of an expert's matrix that a TPU's core holds at once; there are two of them
OUTPUTS = 128  # columns that one program of a GPU computes
DEPTH = 64  # columns of the input that a GPU reads at once


def _divisor(size: int, most: int, step: int) -> int:
    """Return the largest divisor of ``size`` up to ``most`` that is a multiple of ``step``, else ``size``."""
    return next((part for part in range(most // step * step, 0, -step) if size % part == 0), size)


def _cost(x_PI: Array, w_XIO: Matrix, width: int, experts: int, expert_M: Array) -> pl.CostEstimate:
    """Tell XLA, and readers of its programs, what a product costs. Each matrix in use is read once."""
    leaves = jax.tree.leaves(w_XIO)
    matrices = min(experts, len(expert_M)) * sum(
        math.prod(each.shape[1:]) * each.dtype.itemsize for each in leaves
    )
    rows, depth = x_PI.shape
    return pl.CostEstimate(
        flops=2 * rows * depth * width,
        transcendentals=0,
        bytes_accessed=matrices + rows * (depth + width) * x_PI.dtype.itemsize + expert_M.nbytes,
    )


class _Pairs:
    """Says how rows meet the matrices that encoded numbers decode to: one for each number of a byte.

    Each has every n-th input: of rows, or with ``transposed`` of results.
    """

    def __init__(self, matrix: Matrix, transposed: bool) -> None:
        count = matrix.encoding.of_byte if isinstance(matrix, Packed) else 1
        self.inputs, self.outputs = (1, count) if transposed else (count, 1)

    def of_input(self, which: int) -> int:
        return which % self.inputs

    def of_output(self, which: int) -> int:
        return which % self.outputs

    def divided(self, x_PI: Array) -> Array:
        """Return rows [inputs, P, I / inputs]."""
        return jnp.moveaxis(x_PI.reshape(x_PI.shape[0], -1, self.inputs), 2, 0)

    def joined(self, y_NPO: Array) -> Array:
        """Return results [P, O]."""
        return jnp.moveaxis(y_NPO, 0, 2).reshape(y_NPO.shape[1], -1)


Span = tuple[Any, int]  # first and count


def _read_by(matrix: Matrix) -> tuple[list[Array], Callable[[Any, Any, Span, Span], tuple[Array, ...]]]:
    """Return a matrix's arrays, and what reads rows and columns of an expert's from references to them."""
    if not isinstance(matrix, Packed):
        return [matrix], lambda refs, expert, rows, columns: (refs[0][expert, pl.ds(*rows), pl.ds(*columns)],)
    encoding = matrix.encoding
    of_scale = encoding.group // encoding.of_byte  # rows of bytes

    def read(refs: Any, expert: Any, rows: Span, columns: Span) -> tuple[Array, ...]:
        (first, count), outputs = rows, pl.ds(*columns)
        groups = max(1, count // of_scale)
        scales = scale_values(encoding, refs[1][expert, pl.ds(first // of_scale, groups), outputs])
        scales = jnp.broadcast_to(scales[:, None], (groups, count // groups, columns[1]))
        found = values(encoding, refs[0][expert, pl.ds(first, count), outputs])
        return tuple(rounded(each * scales.reshape(count, columns[1]), jnp.bfloat16) for each in found)

    return jax.tree.leaves(matrix), read


def mosaic(
    x_PI: Array, w_XIO: Array, expert_M: Array, transposed: bool, experts: int, interpret: bool
) -> Array:
    """Multiply on TPUs. A matrix is read once for consecutive tiles of its expert."""
    from jax.experimental.pallas import tpu as pltpu

    depth, width = (w_XIO.shape[2], w_XIO.shape[1]) if transposed else (w_XIO.shape[1], w_XIO.shape[2])
    rows = x_PI.shape[0] // expert_M.shape[0]
    columns = _divisor(width, max(128, MATRIX_BYTES // (depth * w_XIO.dtype.itemsize)), 128)

    def kernel(_: Any, x_ref: Any, w_ref: Any, y_ref: Any) -> None:
        y_ref[...] = dot(x_ref[...], w_ref[0], 1, int(transposed)).astype(y_ref.dtype)

    def of_matrix(column: Array, tile: Array, expert_M: Any) -> tuple[Any, ...]:
        return (expert_M[tile], column, 0) if transposed else (expert_M[tile], 0, column)

    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(width // columns, expert_M.shape[0]),
        in_specs=[
            pl.BlockSpec((rows, depth), lambda column, tile, expert_M: (tile, 0)),
            pl.BlockSpec((1, columns, depth) if transposed else (1, depth, columns), of_matrix),
        ],
        out_specs=pl.BlockSpec((rows, columns), lambda column, tile, expert_M: (tile, column)),
    )
    call = pl.pallas_call(
        kernel,
        out_shape=output((x_PI.shape[0], width), x_PI.dtype, x_PI),
        grid_spec=grid,
        cost_estimate=_cost(x_PI, w_XIO, width, experts, expert_M),
        interpret=interpret,
        name="experts",
    )
    with jax.named_scope(COUNTS_ARRAYS):
        return call(expert_M, x_PI, w_XIO)


def triton(
    x_PI: Array, w_XIO: Matrix, expert_M: Array, transposed: bool, experts: int, interpret: bool
) -> Array:
    """Multiply on NVIDIA GPUs. Encoded matrices are decoded as they are read."""
    arrays, reads = _read_by(w_XIO)
    pairs = _Pairs(w_XIO, transposed)
    x_NPI = pairs.divided(x_PI)
    depth, width = x_NPI.shape[2], (arrays[0].shape[1] if transposed else w_XIO.shape[2])
    rows = x_PI.shape[0] // expert_M.shape[0]
    columns, step = min(OUTPUTS, power_in(width)), min(DEPTH, power_in(depth))
    warps = 8 if columns == OUTPUTS else 4
    if isinstance(w_XIO, Packed) and power_in(w_XIO.encoding.group) != w_XIO.encoding.group:
        raise ValueError(f"groups of {w_XIO.encoding.group} inputs are not read by the kernel")

    def kernel(expert_ref: Any, x_ref: Any, *others: Any) -> None:
        *w_refs, y_ref = others
        expert, column = expert_ref[pl.program_id(1)], pl.program_id(0) * columns

        def add(number: Any, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            part, outputs = (number * step, step), (column, columns)
            found = reads(w_refs, expert, *((outputs, part) if transposed else (part, outputs)))
            totals = list(sums)
            for which, w in enumerate(found):
                x = x_ref[pairs.of_input(which), :, pl.ds(*part)]
                totals[pairs.of_output(which)] += dot(x, w.astype(x.dtype), 1, int(transposed))
            return tuple(totals)

        nothing = (jnp.zeros((rows, columns), jnp.float32),) * pairs.outputs
        for which, total in enumerate(lax.fori_loop(0, depth // step, add, nothing)):
            y_ref[which] = total.astype(y_ref.dtype)

    cost = _cost(x_PI, w_XIO, width * pairs.outputs, experts, expert_M)
    y_NPO = run_triton(
        kernel,
        (expert_M, x_NPI, *arrays),
        cost.flops,
        cost.bytes_accessed,
        interpret=interpret,
        warps=warps,
        stages=3,
        out_shape=output((pairs.outputs, x_PI.shape[0], width), x_PI.dtype, x_PI),
        grid=(width // columns, expert_M.shape[0]),
        in_specs=[
            all_of(expert_M.shape),
            pl.BlockSpec((pairs.inputs, rows, depth), lambda column, tile: (0, tile, 0)),
            *(all_of(array.shape) for array in arrays),
        ],
        out_specs=pl.BlockSpec((pairs.outputs, rows, columns), lambda column, tile: (0, tile, column)),
        name="experts",
    )
    return pairs.joined(y_NPO)


def triton_sum(y_WO: Array, place_TC: Array, usual_pairs: int, interpret: bool) -> Array:
    """Add the rows that stand at each token's places, in their order and in fp32, on NVIDIA GPUs: [T, O].

    A place of -1 is none, and nothing is read for it. ``usual_pairs`` is how many others there usually are.
    """
    from jax.experimental.pallas import triton as plgpu

    (tokens, choices), width = place_TC.shape, y_WO.shape[1]
    ranges = powers_of_two(width)

    def kernel(place_ref: Any, y_ref: Any, sum_ref: Any) -> None:
        token = pl.program_id(0)
        for begin, size in ranges:
            total, part = jnp.zeros((size,), jnp.float32), pl.ds(begin, size)
            for choice in range(choices):
                place = place_ref[token, choice]
                is_one = jnp.broadcast_to(place >= 0, (size,))
                row = plgpu.load(y_ref.at[jnp.maximum(place, 0), part], mask=is_one, other=0.0)
                total += row.astype(jnp.float32)
            sum_ref[token, part] = total.astype(sum_ref.dtype)

    return run_triton(
        kernel,
        (place_TC, y_WO),
        0,
        (usual_pairs + tokens) * width * y_WO.dtype.itemsize + place_TC.nbytes,
        interpret=interpret,
        warps=4,
        stages=1,
        out_shape=output((tokens, width), y_WO.dtype, y_WO),
        grid=(tokens,),
        name="sum_of_choices",
    )


def mosaic_unset(shape: tuple[int, ...], like: Array, interpret: bool) -> Array:
    """Return an array that no TPU has written. ``like`` is not read: it keeps the array in its loop."""
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    call = pl.pallas_call(
        _do_nothing,
        out_shape=output(shape, like.dtype, like),
        in_specs=[anywhere],
        out_specs=anywhere,
        interpret=interpret,
        name="unset",
    )
    with jax.named_scope(costs(0, 0)):
        return call(like)


def gpu_unset(language: str, shape: tuple[int, ...], like: Array, interpret: bool) -> Array:
    """Return an array that no GPU has written. ``like`` is not read: it says from when on there is one."""
    return run_on_gpu(
        language,
        _do_nothing,
        (like,),
        pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=0),
        grid=(1,),
        out_shape=output(shape, like.dtype, like),
        name="unset",
        interpret=interpret,
    )


def _do_nothing(*_: Any) -> None:
    pass
