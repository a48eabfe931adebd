"""Sums of rows' gradients by adapter, in one fixed order, by the implementation that is chosen.

An adapter's rows are added one after the other in fp32, in the order in which they stand. So its sum does not
depend, bit for bit, on other adapters' rows; a scatter would leave the order to the device.

Dimension key: B row, S slot, R maximum rank, W width, C columns of a block.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from spmd_tx.models.pallas import THREADS, output, power_in, run_on_gpu
from spmd_tx.protocol.kernels import Kernels
from spmd_tx.sharding.collectives import varying

ROWS_AT_ONCE = 8  # that a GPU reads before it adds them
COLUMNS = 1024  # numbers that one program of a GPU adds
SUMS_BYTES = 4 << 20  # of the sums that a TPU's core holds at once

# (gradients [B, R, W], slots int32 [B], number of slots, Kernels.interpret) -> sums fp32 [S, R, W]
RowSums = Callable[[Array, Array, int, bool], Array]


def row_sums(kernels: Kernels, grad_BRW: Array, slots_B: Array, slots: int) -> Array:
    """Return the sums [S, R, W], fp32, of rows [B, R, W] by their slots, int32 [B]."""
    return IMPLEMENTATIONS[kernels.products](grad_BRW, slots_B, slots, kernels.interpret)


def _reference(grad_BRW: Array, slots_B: Array, slots: int, _: bool) -> Array:
    """Add row after row, for any platform."""

    def add_row(sum_SRW: Array, row: tuple[Array, Array]) -> tuple[Array, None]:
        slot, grad_RW = row
        return sum_SRW.at[slot].add(grad_RW.astype(sum_SRW.dtype)), None

    nothing = varying(jnp.zeros((slots, *grad_BRW.shape[1:]), jnp.float32))
    return lax.scan(add_row, nothing, (slots_B, grad_BRW))[0]


def _mosaic_gpu(grad_BRW: Array, slots_B: Array, slots: int, interpret: bool) -> Array:
    """Add on GPUs from Hopper on. Too few columns for a program's threads are left to Triton."""
    language = "triton" if _columns(grad_BRW) < THREADS else "mosaic_gpu"
    return _on_gpu(language, grad_BRW, slots_B, slots, interpret)


def _columns(grad_BRW: Array) -> int:
    """Return how many columns a program of a GPU adds: a power of two."""
    return min(COLUMNS, power_in(grad_BRW.size // grad_BRW.shape[0]))


def _on_gpu(language: str, grad_BRW: Array, slots_B: Array, slots: int, interpret: bool) -> Array:
    """Add on NVIDIA GPUs: a program reads the rows of one slot, some columns of them."""
    rows, columns = grad_BRW.shape[0], _columns(grad_BRW)
    grad_BW = grad_BRW.reshape(rows, -1)
    together = min(ROWS_AT_ONCE, power_in(rows))

    def kernel(at: Any, slots_ref: Any, grad_ref: Any, sum_ref: Any) -> None:
        own, part = at[0], pl.ds(at[1] * columns, columns)

        def add(turn: Any, sum_C: Array) -> Array:
            found = list[tuple[Array, Array]]()
            for place in range(together):
                row = turn * together + place
                is_own = slots_ref[row] == own
                # Instead of another slot's row, which is not added, it reads one that is in its cache.
                found.append((is_own, grad_ref[jnp.where(is_own, row, 0), part]))
            for is_own, grad_C in found:
                sum_C += jnp.where(jnp.full(columns, is_own), grad_C.astype(jnp.float32), nothing_C)
            return sum_C

        nothing_C = jnp.zeros(columns, jnp.float32)
        sum_ref[own, part] = lax.fori_loop(0, rows // together, add, nothing_C)

    sum_SW = run_on_gpu(
        language,
        kernel,
        (slots_B, grad_BW),
        _cost(grad_BRW, slots),
        grid=(slots, grad_BW.shape[1] // columns),
        out_shape=output((slots, grad_BW.shape[1]), jnp.float32, grad_BRW),
        interpret=interpret,
        name="row_sums",
    )
    return sum_SW.reshape(slots, *grad_BRW.shape[1:])


def _mosaic(grad_BRW: Array, slots_B: Array, slots: int, interpret: bool) -> Array:
    """Add on TPUs, which hold the sums of some columns while rows pass by."""
    from jax.experimental.pallas import tpu as pltpu

    rows, rank, width = grad_BRW.shape
    most = max(128, SUMS_BYTES // (4 * slots * rank))
    columns = next((part for part in range(most // 128 * 128, 0, -128) if width % part == 0), width)

    def kernel(slots_ref: Any, grad_ref: Any, sum_ref: Any) -> None:
        row = pl.program_id(1)

        @pl.when(row == 0)
        def _begin() -> None:
            sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)

        slot = slots_ref[row]
        sum_ref[slot] += grad_ref[0].astype(jnp.float32)

    call = pl.pallas_call(
        kernel,
        out_shape=output((slots, rank, width), jnp.float32, grad_BRW),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(width // columns, rows),
            in_specs=[pl.BlockSpec((1, rank, columns), lambda part, row, slots: (row, 0, part))],
            out_specs=pl.BlockSpec((slots, rank, columns), lambda part, row, slots: (0, 0, part)),
        ),
        cost_estimate=_cost(grad_BRW, slots),
        interpret=interpret,
        name="row_sums",
    )
    return call(slots_B, grad_BRW)


IMPLEMENTATIONS: dict[str, RowSums] = {
    "mosaic": _mosaic,
    "mosaic_gpu": _mosaic_gpu,
    "triton": partial(_on_gpu, "triton"),
    "reference": _reference,
}


def _cost(grad_BRW: Array, slots: int) -> pl.CostEstimate:
    numbers = grad_BRW.size // grad_BRW.shape[0]
    bytes_accessed = grad_BRW.size * grad_BRW.dtype.itemsize + 4 * slots * numbers
    return pl.CostEstimate(flops=grad_BRW.size, transcendentals=0, bytes_accessed=bytes_accessed)
