"""Operations of custom losses that move elements, make new tensors, or tell about shapes and types."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from spmd_tx.custom_loss import Ellipses
from spmd_tx.worker.loss_elementwise import apply, cast
from spmd_tx.worker.loss_values import (
    Dim,
    Length,
    LossProblem,
    Number,
    Tensor,
    Trace,
    Value,
    axes_of,
    axis_of,
    category,
    promote,
    python_dtype,
    shown,
)

Function = Callable[..., Any]


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
            return _permute(trace, x, tuple(reversed(range(x.ndim))))
    return None  # there is one device


def _size(trace: Trace, x: Tensor, dim: Any = None) -> Any:
    return x.shape if dim is None else x.shape[axis_of(dim, x.ndim)]


def _numel(trace: Trace, x: Tensor) -> Dim | Number:
    lengths = [dim for dim in x.shape if isinstance(dim, Length)]
    factor = prod(dim for dim in x.shape if isinstance(dim, int))
    if len(lengths) > 1:
        sizes = [jnp.asarray(trace.size(length), jnp.int64) for length in lengths]
        return Number(jnp.prod(jnp.stack(sizes)) * factor)
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
    """Tokens stay the first dimension, so that what is not real stays behind what is."""
    wanted = list(_plain(shape, "sizes"))
    if wanted.count(-1) > 1:
        raise LossProblem("only one size can be -1")
    if -1 in wanted:
        wanted[wanted.index(-1)] = _quotient(trace, x, [dim for dim in wanted if dim != -1])
    target = tuple(wanted)
    before, after = ([dim for dim in dims if dim != 1] for dims in (x.shape, target))
    if before != after and any(isinstance(dim, Length) for dim in (*before[1:], *after[1:])):
        raise LossProblem(
            f"{shown(x.shape)} cannot become {shown(target)}: tokens must stay the first dimension"
        )
    if _numel(trace, x) != _numel(trace, Tensor(x.array, target)) and before != after:
        raise LossProblem(f"{shown(x.shape)} and {shown(target)} do not have equally many elements")
    return trace.tensor(x.array.reshape(trace.widths(target)), target)


def _quotient(trace: Trace, x: Tensor, others: Sequence[Dim]) -> Dim:
    """What -1 stands for beside the other sizes of a new shape."""
    total, known = _numel(trace, x), _numel(trace, Tensor(x.array, tuple(others)))
    match total, known:
        case int(), int() if known and total % known == 0:
            return total // known
        case Length(), int() if known and not (total.per_token % known or total.extra % known):
            return Length(total.per_token // known, total.extra // known)
        case Length(), Length():
            factor = total.per_token // known.per_token
            if total == Length(known.per_token * factor, known.extra * factor):
                return factor
    raise LossProblem(f"-1 has no value: {shown(x.shape)} does not split by {shown(others)}")


def _flatten(trace: Trace, x: Tensor, start_dim: Any = 0, end_dim: Any = -1) -> Tensor:
    start, end = axis_of(start_dim, x.ndim), axis_of(end_dim, x.ndim)
    if not x.ndim:
        return trace.tensor(x.array[None], (1,))
    middle = _numel(trace, Tensor(x.array, x.shape[start : end + 1]))
    if isinstance(middle, Number):
        raise LossProblem("two dimensions of tokens cannot become one")
    return _reshape(trace, x, (*x.shape[:start], middle, *x.shape[end + 1 :]))


def _unsqueeze(trace: Trace, x: Tensor, dim: Any) -> Tensor:
    axis = axis_of(dim, x.ndim + 1)
    return trace.tensor(jnp.expand_dims(x.array, axis), (*x.shape[:axis], 1, *x.shape[axis:]))


def _squeeze(trace: Trace, x: Tensor, dim: Any = None) -> Tensor:
    axes = tuple(axis for axis in axes_of(dim, x.ndim) if x.shape[axis] == 1)
    shape = tuple(size for axis, size in enumerate(x.shape) if axis not in axes)
    return trace.tensor(jnp.squeeze(x.array, axes), shape)


def _permute(trace: Trace, x: Tensor, dims: Any) -> Tensor:
    axes = [axis_of(dim, x.ndim) for dim in dims]
    if sorted(axes) != list(range(x.ndim)):
        raise LossProblem(f"{list(dims)} does not name each of {x.ndim} dimensions once")
    return trace.tensor(jnp.transpose(x.array, axes), [x.shape[axis] for axis in axes])


def _transpose(trace: Trace, x: Tensor, dim0: Any, dim1: Any) -> Tensor:
    axes = list(range(x.ndim))
    one, other = axis_of(dim0, x.ndim), axis_of(dim1, x.ndim)
    axes[one], axes[other] = axes[other], axes[one]
    return _permute(trace, x, axes)


def _t(trace: Trace, x: Tensor) -> Tensor:
    if x.ndim > 2:
        raise LossProblem("it takes at most two dimensions")
    return _permute(trace, x, tuple(reversed(range(x.ndim))))


def _expand(trace: Trace, x: Tensor, size: Any) -> Tensor:
    wanted = _plain(size, "sizes")
    if len(wanted) < x.ndim:
        raise LossProblem(f"{shown(x.shape)} cannot have fewer dimensions")
    own = (1,) * (len(wanted) - x.ndim) + x.shape
    shape = tuple(dim if new == -1 else new for dim, new in zip(own, wanted, strict=True))
    if any(dim not in (1, new) for dim, new in zip(own, shape, strict=True)):
        raise LossProblem(f"{shown(x.shape)} cannot become {shown(shape)}")
    return trace.broadcast(x, shape)


def _cat(trace: Trace, tensors: Sequence[Tensor], dim: Any = 0) -> Tensor:
    """Each piece begins at the true end of the one before, and covers what is not real of it."""
    if not tensors:
        raise LossProblem("there is nothing to put together")
    axis = axis_of(dim, tensors[0].ndim)
    dtype = tensors[0].dtype
    for other in tensors[1:]:
        dtype = promote(dtype, other.dtype)
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
        total = _plus(total, piece)
    shape = (*tensors[0].shape[:axis], total, *tensors[0].shape[axis + 1 :])
    array = jnp.zeros(trace.widths(shape), dtype)
    for start, each in zip(starts, tensors, strict=True):
        array = lax.dynamic_update_slice_in_dim(array, trace.filled(each, 0).astype(dtype), start, axis)
    return trace.tensor(array, shape)


def _plus(one: Dim, other: Dim) -> Dim:
    if isinstance(one, int) and isinstance(other, int):
        return one + other
    a, b = (each if isinstance(each, Length) else Length(0, each) for each in (one, other))
    return Length(a.per_token + b.per_token, a.extra + b.extra)


def _stack(trace: Trace, tensors: Sequence[Tensor], dim: Any = 0) -> Tensor:
    return _cat(trace, [_unsqueeze(trace, each, dim) for each in tensors], axis_of(dim, tensors[0].ndim + 1))


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
    for _ in range(n if isinstance(n, int) else 1):
        before = (slice(None),) * axis
        later, earlier = (getitem(trace, x, (*before, part)) for part in (slice(1, None), slice(None, -1)))
        x = apply(trace, jnp.subtract, later, earlier)
    return x


def _gather(trace: Trace, x: Tensor, dim: Any, index: Tensor, sparse_grad: Any = None) -> Tensor:
    """An index out of range gives NaN, and so an error: whether it is, only the values tell."""
    axis = axis_of(dim, x.ndim)
    fits = x.ndim == index.ndim and all(
        one == other
        for place, (one, other) in enumerate(zip(x.shape, index.shape, strict=False))
        if place != axis
    )
    if not fits or category(index.dtype) != "i":
        raise LossProblem(f"the index {shown(index.shape)} of {index.dtype} does not fit {shown(x.shape)}")
    return _picked(trace, jnp.take_along_axis, x, index, axis, index.shape)


def _picked(
    trace: Trace, take: Function, x: Tensor, index: Tensor, axis: int, shape: Sequence[Dim]
) -> Tensor:
    size, places = trace.size(x.shape[axis]), trace.filled(index, 0)
    is_there = (places >= 0) & (places < size)
    array = take(x.array, jnp.where(is_there, places, 0), axis)
    if x.is_floating:
        later = (1,) * (array.ndim - axis - places.ndim) if take is jnp.take else ()
        array = jnp.where(is_there.reshape(*is_there.shape, *later), array, jnp.nan)
    return trace.tensor(array, shape)


def getitem(trace: Trace, x: Any, index: Any) -> Any:
    """Of a tensor, of a shape, or of several results."""
    if not isinstance(x, Tensor):
        if isinstance(x, tuple) and isinstance(index, int | slice):
            return x[index]
        raise LossProblem("only tensors, shapes and results of several parts can be indexed")
    several = index if isinstance(index, tuple) else (index,)
    consumed = sum(each is not None and not _is_dots(each) for each in several)
    if consumed > x.ndim:
        raise LossProblem(f"{consumed} indices are too many for {shown(x.shape)}")
    axis, takes = 0, 0
    for each in several:
        if _is_dots(each):
            axis += x.ndim - axis - _consumed_after(several, each)
        elif each is None:
            x, axis = _unsqueeze(trace, x, axis), axis + 1
        elif isinstance(each, slice):
            x, axis = _slice(trace, x, each, axis), axis + 1
        elif isinstance(each, Tensor) and each.ndim:
            takes += 1
            if takes > 1 or axis:
                raise LossProblem("a tensor as an index must be the first and only one; use torch.gather")
            x, axis = _take(trace, x, each), each.ndim
        else:
            x = _element(trace, x, each, axis)
    return x


def _is_dots(index: Any) -> bool:
    return index is ... or isinstance(index, Ellipses)


def _consumed_after(indices: Sequence[Any], dots: Any) -> int:
    place = next(place for place, each in enumerate(indices) if each is dots)
    return sum(each is not None for each in indices[place + 1 :])


def _take(trace: Trace, x: Tensor, index: Tensor) -> Tensor:
    if category(index.dtype) != "i":
        raise LossProblem(
            "a tensor of bool as an index gives a result without a fixed shape; multiply by it, or use torch.where"
        )
    return _picked(trace, jnp.take, x, index, 0, (*index.shape, *x.shape[1:]))


def _element(trace: Trace, x: Tensor, index: Any, axis: int) -> Tensor:
    size, shape = x.shape[axis], x.shape[:axis] + x.shape[axis + 1 :]
    if isinstance(index, Tensor):
        if category(index.dtype) != "i":
            raise LossProblem("an index must be an integer")
        moved = _permute(trace, x, (axis, *(other for other in range(x.ndim) if other != axis)))
        return _picked(trace, jnp.take, moved, index, 0, shape)
    if isinstance(index, Length):
        index = _from_end(trace, size, index)
    if isinstance(index, bool) or not isinstance(index, int):
        raise LossProblem(f"an index is a {type(index).__name__}; it must be an integer")
    trace.require(size, index + 1 if index >= 0 else -index)
    place = trace.size(size) + index if index < 0 else index
    if isinstance(place, int):
        return trace.tensor(lax.index_in_dim(x.array, place, axis, keepdims=False), shape)
    return trace.tensor(lax.dynamic_index_in_dim(x.array, place, axis, keepdims=False), shape)


def _from_end(trace: Trace, size: Dim, index: Length) -> int:
    """x[n - 1] as x[-1]."""
    if not isinstance(size, Length) or size.per_token != index.per_token or index.extra >= size.extra:
        raise LossProblem(f"the index {index} is not within the size {size}")
    return index.extra - size.extra


def _slice(trace: Trace, x: Tensor, part: slice, axis: int) -> Tensor:
    size = x.shape[axis]
    if part == slice(None):
        return x
    if isinstance(size, int):
        return _plain_slice(trace, x, part, axis, size)
    if part.step not in (None, 1):
        raise LossProblem("tokens are not taken in steps; use a mask")
    start = _bound(size, 0 if part.start is None else part.start)
    stop = _bound(size, size if part.stop is None else part.stop)
    if isinstance(stop, Length) and stop.extra > size.extra:
        stop = size
    return _cut(trace, x, axis, start, stop)


def _bound(size: Length, bound: Any) -> Dim:
    if isinstance(bound, bool) or not isinstance(bound, int | Length):
        raise LossProblem("bounds of slices must be plain integers, or sizes of tensors")
    if isinstance(bound, Length):
        if bound.per_token != size.per_token:
            raise LossProblem(f"the bound {bound} does not go with the size {size}")
        return bound
    return _plus(size, bound) if bound < 0 else bound


def _cut(trace: Trace, x: Tensor, axis: int, start: Dim, stop: Dim) -> Tensor:
    size = x.shape[axis]
    if isinstance(start, int) and isinstance(stop, Length):
        length: Dim = Length(stop.per_token, stop.extra - start)
        array = lax.slice_in_dim(x.array, start, start + trace.width(length), axis=axis)
    elif isinstance(start, int) and isinstance(stop, int):
        trace.require(size, stop)
        if stop > x.array.shape[axis]:
            raise LossProblem(f"it takes {stop} of at most {x.array.shape[axis]} elements")
        length = max(stop - start, 0)
        array = lax.slice_in_dim(x.array, start, start + length, axis=axis)
    elif isinstance(start, Length) and isinstance(stop, Length):
        length = max(stop.extra - start.extra, 0)
        trace.require(start, 0)
        trace.require(size, length)
        array = lax.dynamic_slice_in_dim(
            x.array, jnp.maximum(jnp.asarray(trace.size(start)), 0), length, axis
        )
    else:
        raise LossProblem("a slice from the end to a fixed place has no fixed length; use a mask")
    return trace.tensor(array, (*x.shape[:axis], length, *x.shape[axis + 1 :]))


def _plain_slice(trace: Trace, x: Tensor, part: slice, axis: int, size: int) -> Tensor:
    bounds = (part.start, part.stop, part.step)
    if any(each is not None and (isinstance(each, bool) or not isinstance(each, int)) for each in bounds):
        raise LossProblem("bounds of slices must be plain integers")
    if part.step is not None and part.step < 1:
        raise LossProblem("steps of slices must be at least 1; use flip")
    array = x.array[(slice(None),) * axis + (part,)]
    return trace.tensor(array, (*x.shape[:axis], array.shape[axis], *x.shape[axis + 1 :]))


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
    length = _plus(length, -first)
    return trace.tensor(
        jnp.arange(trace.width(length), dtype=dtype or jnp.int64) + jnp.asarray(first, dtype or jnp.int64),
        (length,),
    )


def _to(trace: Trace, x: Tensor, target: Any = None, dtype: Any = None) -> Tensor:
    wanted = target if dtype is None else dtype
    if wanted is None:
        return x
    return cast(x, wanted.dtype if isinstance(wanted, Tensor) else wanted)


def _like(value: float | None) -> Function:
    def run(trace: Trace, x: Tensor, value_: Any = value, dtype: Any = None, **given: Any) -> Tensor:
        return _full(trace, x.shape, given.get("value", value_), dtype or x.dtype)

    return run


def _new(value: float | None) -> Function:
    def run(trace: Trace, x: Tensor, size: Any, dtype: Any = None, **given: Any) -> Tensor:
        return _full(trace, size, given.get("value", value), dtype or x.dtype)

    return run


FUNCTIONS: dict[str, Function] = {
    "getattr": _getattr,
    "size": _size,
    "numel": _numel,
    "dim": lambda trace, x: x.ndim,
    "getitem": getitem,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "flatten": _flatten,
    "transpose": _transpose,
    "t": _t,
    "permute": _permute,
    "expand": _expand,
    "expand_as": lambda trace, x, other: _expand(trace, x, other.shape),
    "view_as": lambda trace, x, other: _reshape(trace, x, other.shape),
    "cat": _cat,
    "stack": _stack,
    "pad": _pad,
    "flip": _flip,
    "diff": _diff,
    "gather": _gather,
    "take_along_dim": lambda trace, x, indices, dim: _gather(trace, x, dim, indices),
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
