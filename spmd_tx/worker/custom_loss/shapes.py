"""Operations of custom losses that move elements, make tensors, or read shapes and types."""

from collections.abc import Sequence
from functools import reduce
from math import prod
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from spmd_tx.worker.custom_loss.elementwise import apply, cast
from spmd_tx.worker.custom_loss.indexing import gather, getitem, permute, plus, unsqueeze
from spmd_tx.worker.custom_loss.values import (
    Dim,
    Function,
    Length,
    LossProblem,
    Tensor,
    Trace,
    TracedNumber,
    Value,
    axes_of,
    axis_of,
    promote,
    python_dtype,
    shown,
)

MAX_DIFFERENCES = 8  # the highest order of diff


def _getattr(trace: Trace, x: Any, name: str) -> Any:
    if name in ("values", "indices"):  # of max, min, sort and topk
        return getitem(trace, x, 0 if name == "values" else 1)
    if not isinstance(x, Tensor):
        raise LossProblem(f"only tensors have {name}")
    match name:
        case "shape":
            return x.shape
        case "ndim":
            return x.ndim
        case "dtype":
            return x.dtype
        case "T":
            return permute(trace, x, tuple(reversed(range(x.ndim))))
    return None  # there is one device


def _size(trace: Trace, x: Tensor, dim: Any = None) -> Any:
    return x.shape if dim is None else x.shape[axis_of(dim, x.ndim)]


def _numel(trace: Trace, x: Tensor) -> Dim | TracedNumber:
    lengths = [dim for dim in x.shape if isinstance(dim, Length)]
    factor = prod(dim for dim in x.shape if isinstance(dim, int))
    if len(lengths) > 1:
        sizes = [jnp.asarray(trace.size(length), jnp.int64) for length in lengths]
        return TracedNumber(jnp.prod(jnp.stack(sizes)) * factor)
    return Length(factor * lengths[0].per_token, factor * lengths[0].extra) if lengths and factor else factor


def _plain(values: Any, what: str) -> tuple[Dim, ...]:
    several = values if isinstance(values, list | tuple) else [values]
    if len(several) == 1 and isinstance(several[0], tuple):  # torch.ones(x.shape)
        several = several[0]
    for value in several:
        if isinstance(value, bool) or not isinstance(value, int | Length):
            raise LossProblem(f"{what} must be plain integers, or sizes of other tensors")
    return tuple(several)


def _reshape(trace: Trace, x: Tensor, shape: Any) -> Tensor:
    """Reshape. Tokens must stay the first dimension, so that padding stays behind real elements."""
    sizes = list(_plain(shape, "sizes"))
    if sizes.count(-1) > 1:
        raise LossProblem("only one size can be -1")
    if -1 in sizes:
        sizes[sizes.index(-1)] = _quotient(trace, x, [dim for dim in sizes if dim != -1])
    target = tuple(sizes)
    before, after = ([dim for dim in dims if dim != 1] for dims in (x.shape, target))
    if before != after and any(isinstance(dim, Length) for dim in (*before[1:], *after[1:])):
        raise LossProblem(
            f"{shown(x.shape)} cannot become {shown(target)}: tokens must stay the first dimension"
        )
    if _numel(trace, x) != _numel(trace, Tensor(x.array, target)) and before != after:
        raise LossProblem(f"{shown(x.shape)} and {shown(target)} do not have equally many elements")
    return trace.tensor(x.array.reshape(trace.widths(target)), target)


def _quotient(trace: Trace, x: Tensor, others: Sequence[Dim]) -> Dim:
    """Return the size that -1 stands for, given the other sizes of a new shape."""
    total, divisor = _numel(trace, x), _numel(trace, Tensor(x.array, tuple(others)))
    match total, divisor:
        case int(), int() if divisor and total % divisor == 0:
            return total // divisor
        case Length(), int() if divisor and not (total.per_token % divisor or total.extra % divisor):
            return Length(total.per_token // divisor, total.extra // divisor)
        case Length(), Length():
            factor = total.per_token // divisor.per_token
            if total == Length(divisor.per_token * factor, divisor.extra * factor):
                return factor
    raise LossProblem(f"-1 has no value: {shown(x.shape)} does not split by {shown(others)}")


def _flatten(trace: Trace, x: Tensor, start_dim: Any = 0, end_dim: Any = -1) -> Tensor:
    start, end = axis_of(start_dim, x.ndim), axis_of(end_dim, x.ndim)
    if not x.ndim:
        return trace.tensor(x.array[None], (1,))
    middle = _numel(trace, Tensor(x.array, x.shape[start : end + 1]))
    if isinstance(middle, TracedNumber):
        raise LossProblem("two dimensions of tokens cannot become one")
    return _reshape(trace, x, (*x.shape[:start], middle, *x.shape[end + 1 :]))


def _squeeze(trace: Trace, x: Tensor, dim: Any = None) -> Tensor:
    axes = tuple(axis for axis in axes_of(dim, x.ndim) if x.shape[axis] == 1)
    shape = tuple(size for axis, size in enumerate(x.shape) if axis not in axes)
    return trace.tensor(jnp.squeeze(x.array, axes), shape)


def _transpose(trace: Trace, x: Tensor, dim0: Any, dim1: Any) -> Tensor:
    axes = list(range(x.ndim))
    one, other = axis_of(dim0, x.ndim), axis_of(dim1, x.ndim)
    axes[one], axes[other] = axes[other], axes[one]
    return permute(trace, x, axes)


def _t(trace: Trace, x: Tensor) -> Tensor:
    if x.ndim > 2:
        raise LossProblem("it takes at most two dimensions")
    return permute(trace, x, tuple(reversed(range(x.ndim))))


def _expand(trace: Trace, x: Tensor, size: Any) -> Tensor:
    sizes = _plain(size, "sizes")
    if len(sizes) < x.ndim:
        raise LossProblem(f"{shown(x.shape)} cannot have fewer dimensions")
    padded = (1,) * (len(sizes) - x.ndim) + x.shape
    shape = tuple(dim if new == -1 else new for dim, new in zip(padded, sizes, strict=True))
    if any(dim not in (1, new) for dim, new in zip(padded, shape, strict=True)):
        raise LossProblem(f"{shown(x.shape)} cannot become {shown(shape)}")
    return trace.broadcast(x, shape)


def _cat(trace: Trace, tensors: Sequence[Tensor], dim: Any = 0) -> Tensor:
    """Concatenate. Each piece begins at the true end of the one before, and overwrites its padding."""
    if not tensors:
        raise LossProblem("there is nothing to put together")
    axis = axis_of(dim, tensors[0].ndim)
    dtype = reduce(promote, (each.dtype for each in tensors))
    shapes = {each.shape[:axis] + each.shape[axis + 1 :] for each in tensors}
    if len(shapes) > 1 or not tensors[0].ndim:
        raise LossProblem(f"{' and '.join(shown(each.shape) for each in tensors)} cannot be put together")
    total: Dim = 0
    starts: list[Array | int] = []
    for each in tensors:
        starts.append(trace.size(total))
        piece = each.shape[axis]
        if isinstance(piece, Length) and piece.extra < 0:
            trace.require(piece, 0)
        total = plus(total, piece)
    shape = (*tensors[0].shape[:axis], total, *tensors[0].shape[axis + 1 :])
    array = jnp.zeros(trace.widths(shape), dtype)
    for start, each in zip(starts, tensors, strict=True):
        array = lax.dynamic_update_slice_in_dim(array, trace.filled(each, 0).astype(dtype), start, axis)
    return trace.tensor(array, shape)


def _stack(trace: Trace, tensors: Sequence[Tensor], dim: Any = 0) -> Tensor:
    return _cat(trace, [unsqueeze(trace, each, dim) for each in tensors], axis_of(dim, tensors[0].ndim + 1))


def _pad(trace: Trace, x: Tensor, pad: Any, mode: str | None = None, value: Any = None) -> Tensor:
    sides = _plain(pad, "pad")
    if len(sides) != 2 or not x.ndim or not all(isinstance(side, int) for side in sides):
        raise LossProblem("it takes two numbers, for the last dimension only")
    start, stop = (-side if side < 0 else 0 for side in sides if isinstance(side, int))
    index = (..., slice(start, -stop if stop else None))
    x = getitem(trace, x, index)
    pieces = [x]
    for side, place in zip(sides, (0, 1), strict=True):
        if isinstance(side, int) and side > 0:
            fill = _full(trace, (*x.shape[:-1], side), 0 if value is None else value, x.dtype)
            pieces.insert(0 if place == 0 else len(pieces), fill)
    return _cat(trace, pieces, -1)


def _flip(trace: Trace, x: Tensor, dims: Any) -> Tensor:
    array = x.array
    for dim in _plain(dims, "dims"):
        axis = axis_of(dim, x.ndim)
        size = x.shape[axis]
        if isinstance(size, int):
            array = jnp.flip(array, axis)
            continue
        places = trace.size(size) - 1 - jnp.arange(trace.width(size))
        array = jnp.take(array, jnp.maximum(places, 0), axis)
    return trace.tensor(array, x.shape)


def _diff(trace: Trace, x: Tensor, n: Any = 1, dim: Any = -1) -> Tensor:
    axis = axis_of(dim, x.ndim)
    if not isinstance(n, int) or not 1 <= n <= MAX_DIFFERENCES:
        raise LossProblem(f"n must be 1 to {MAX_DIFFERENCES}")
    for _ in range(n):
        before = (slice(None),) * axis
        later, earlier = (getitem(trace, x, (*before, part)) for part in (slice(1, None), slice(None, -1)))
        x = apply(trace, jnp.subtract, later, earlier)
    return x


def _full(trace: Trace, size: Any, value: Value, dtype: Any = None) -> Tensor:
    shape = _plain(size, "sizes")
    if dtype is None:
        dtype = value.dtype if isinstance(value, Tensor) else python_dtype(value)
    return trace.broadcast(cast(trace.as_tensor(value), dtype), shape)


def _arange(trace: Trace, start: Any, end: Any = None, step: Any = 1, dtype: Any = None) -> Tensor:
    first, last = (0, start) if end is None else (start, end)
    if not isinstance(first, int) or step != 1:
        raise LossProblem("it begins with a plain integer, and goes in steps of 1")
    (length,) = _plain(last, "sizes")
    length = plus(length, -first)
    return trace.tensor(
        jnp.arange(trace.width(length), dtype=dtype or jnp.int64) + jnp.asarray(first, dtype or jnp.int64),
        (length,),
    )


def _to(trace: Trace, x: Tensor, target: Any = None, dtype: Any = None) -> Tensor:
    target_dtype = target if dtype is None else dtype
    if target_dtype is None:
        return x
    return cast(x, target_dtype.dtype if isinstance(target_dtype, Tensor) else target_dtype)


def _like(value: Any) -> Function:
    return lambda trace, x, value=value, dtype=None: _full(trace, x.shape, value, dtype or x.dtype)


def _new(value: Any) -> Function:
    return lambda trace, x, size, value=value, dtype=None: _full(trace, size, value, dtype or x.dtype)


FUNCTIONS: dict[str, Function] = {
    "getattr": _getattr,
    "size": _size,
    "numel": _numel,
    "dim": lambda trace, x: x.ndim,
    "getitem": getitem,
    "unsqueeze": unsqueeze,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "flatten": _flatten,
    "transpose": _transpose,
    "t": _t,
    "permute": permute,
    "expand": _expand,
    "expand_as": lambda trace, x, other: _expand(trace, x, other.shape),
    "view_as": lambda trace, x, other: _reshape(trace, x, other.shape),
    "cat": _cat,
    "stack": _stack,
    "pad": _pad,
    "flip": _flip,
    "diff": _diff,
    "gather": gather,
    "take_along_dim": lambda trace, x, indices, dim: gather(trace, x, dim, indices),
    "zeros_like": _like(0.0),
    "ones_like": _like(1.0),
    "full_like": _like(None),
    "new_zeros": _new(0.0),
    "new_ones": _new(1.0),
    "new_full": _new(None),
    "zeros": lambda trace, size, dtype=None: _full(trace, size, 0.0, dtype),
    "ones": lambda trace, size, dtype=None: _full(trace, size, 1.0, dtype),
    "full": _full,
    "arange": _arange,
    "to": _to,
    "type_as": lambda trace, x, other: cast(x, other.dtype),
}
