"""What Pallas kernels have in common: their calls, results, blocks, and products with sums in fp32."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from spmd_tx.hlo.hints import costs


def triton_call(
    kernel: Any, *, interpret: bool, warps: int, stages: int | None = None, **options: Any
) -> Callable[..., Any]:
    """Return the call of a kernel on NVIDIA GPUs, or with ``interpret`` as a plain XLA program.

    ``options`` are those of pl.pallas_call.
    """
    from jax.experimental.pallas import triton as plgpu

    parameters = None if interpret else plgpu.CompilerParams(num_warps=warps, num_stages=stages)
    return pl.pallas_call(kernel, compiler_params=parameters, interpret=interpret, **options)


def run_triton(kernel: Any, arrays: Sequence[Array], flops: int, moved: int, **options: Any) -> Any:
    """Run a kernel that does so many operations, and moves so many bytes; ``options`` as in triton_call.

    Unless they say otherwise, every program sees whole arrays.
    """
    options.setdefault("in_specs", [all_of(array.shape) for array in arrays])
    options.setdefault("out_specs", jax.tree.map(lambda each: all_of(each.shape), options["out_shape"]))
    with jax.named_scope(costs(flops, moved)):
        return triton_call(kernel, **options)(*arrays)


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
