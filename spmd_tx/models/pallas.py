"""What Pallas kernels have in common: their calls, results, blocks, and products with sums in fp32."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from spmd_tx.hlo.hints import costs

WARPS = 4  # of a program, which Mosaic GPU calls a warpgroup; their threads divide every vector among them
THREADS = 32 * WARPS


def run_triton(
    kernel: Any, arrays: Sequence[Array], flops: int, moved: int, *, warps: int, **options: Any
) -> Any:
    """Run a kernel on NVIDIA GPUs that does so many operations, and moves so many bytes.

    ``options`` are those of pl.pallas_call, and ``stages``, how far a loop reads ahead; with ``interpret`` it
    runs as a plain XLA program. Unless they say otherwise, every program sees whole arrays.
    """
    from jax.experimental.pallas import triton as plgpu

    parameters = plgpu.CompilerParams(num_warps=warps, num_stages=options.pop("stages", None))
    options.setdefault("in_specs", [all_of(array.shape) for array in arrays])
    options.setdefault("out_specs", jax.tree.map(lambda each: all_of(each.shape), options["out_shape"]))
    parameters = None if options["interpret"] else parameters
    with jax.named_scope(costs(flops, moved)):
        return pl.pallas_call(kernel, compiler_params=parameters, **options)(*arrays)


def run_on_gpu(
    language: str,
    kernel: Any,
    arrays: Sequence[Array],
    cost: pl.CostEstimate,
    *,
    grid: tuple[int, ...],
    out_shape: jax.ShapeDtypeStruct,
    name: str,
    interpret: bool,
) -> Array:
    """Run a kernel in Pallas' "mosaic_gpu" or "triton", by programs of four warps that read main memory.

    It gets its program's place in the grid, and references to arrays and the result.
    """
    if language == "triton" or interpret:

        def at_its_place(*refs: Any) -> None:
            kernel(tuple(pl.program_id(axis) for axis in range(len(grid))), *refs)

        return run_triton(
            at_its_place,
            arrays,
            cost.flops,
            cost.bytes_accessed,
            warps=WARPS,
            grid=grid,
            out_shape=out_shape,
            name=name,
            interpret=interpret,
        )
    from jax.experimental.pallas import mosaic_gpu as plgpu

    axes = tuple(f"grid_{axis}" for axis in range(len(grid)))

    def placed(*refs: Any) -> None:
        kernel(tuple(lax.axis_index(axis) for axis in axes), *refs)

    placed.__name__ = name
    found = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)  # layouts
    places: Any = {"grid": grid, "grid_names": axes, "compiler_params": found}
    with jax.named_scope(costs(cost.flops, cost.bytes_accessed)):
        result = plgpu.kernel(placed, out_type=out_shape, **places)(*arrays)
    differs = tuple(out_shape.manual_axis_type.varying)  # between devices, which Mosaic GPU does not say
    return lax.pcast(result, differs, to="varying") if differs else result


def in_main_memory(x: Array, *, interpret: bool) -> Array:
    """Return an array that a loop updates, by a TPU kernel that wants it in main memory and does nothing.

    XLA would copy an array that fits there into on-chip memory, and the whole of it back behind the loop.
    """
    from jax.experimental.pallas import tpu as pltpu

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    call = pl.pallas_call(
        lambda *_: None,
        out_shape=output(x.shape, x.dtype, x),
        in_specs=[anywhere],
        out_specs=anywhere,
        input_output_aliases={0: 0},
        interpret=interpret,
        name="in_main_memory",
    )
    with jax.named_scope(costs(0, 0)):
        return call(x if interpret else pltpu.with_memory_space_constraint(x, pltpu.HBM))


def all_of(shape: tuple[int, ...]) -> pl.BlockSpec:
    """Give every program a whole array."""
    return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))


def output(shape: tuple[int, ...], dtype: DTypeLike, like: Array) -> jax.ShapeDtypeStruct:
    """Declare a result that differs between the same devices as ``like`` does."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type)


def dot(x: Array, y: Array, over_x: int = 1, over_y: int = 0) -> Array:
    """Multiply with sums in fp32 over one dimension of each; fp32 is multiplied as such."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    contract = (((over_x,), (over_y,)), ((), ()))
    return lax.dot_general(x, y, contract, precision=precision, preferred_element_type=jnp.float32)


def power_in(size: int) -> int:
    """Return the largest power of two that divides a size."""
    return size & -size


def powers_of_two(width: int) -> list[tuple[int, int]]:
    """Divide columns into parts whose widths are falling powers of two: where each begins, and its width."""
    parts, begin = list[tuple[int, int]](), 0
    while begin < width:
        parts.append((begin, 1 << (width - begin).bit_length() - 1))
        begin += parts[-1][1]
    return parts
