"""Indexing of values in custom losses: x[1:], x[-1], gather."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from spmd_tx.worker.custom_loss.values import (
    Dim,
    Function,
    Length,
    LossProblem,
    Tensor,
    Trace,
    axis_of,
    category,
    shown,
)


def unsqueeze(trace: Trace, x: Tensor, dim: Any) -> Tensor:
    axis = axis_of(dim, x.ndim + 1)
    return trace.tensor(jnp.expand_dims(x.array, axis), (*x.shape[:axis], 1, *x.shape[axis:]))


def permute(trace: Trace, x: Tensor, dims: Any) -> Tensor:
    axes = [axis_of(dim, x.ndim) for dim in dims]
    if sorted(axes) != list(range(x.ndim)):
        raise LossProblem(f"{list(dims)} does not name each of {x.ndim} dimensions once")
    return trace.tensor(jnp.transpose(x.array, axes), [x.shape[axis] for axis in axes])


def plus(one: Dim, other: Dim) -> Dim:
    if isinstance(one, int) and isinstance(other, int):
        return one + other
    a, b = (each if isinstance(each, Length) else Length(0, each) for each in (one, other))
    return Length(a.per_token + b.per_token, a.extra + b.extra)


def gather(trace: Trace, x: Tensor, dim: Any, index: Tensor, sparse_grad: Any = None) -> Tensor:
    """Gather along a dimension. An index out of range gives NaN, and so an error once values are known."""
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
    """Index a tensor, a shape, or several results."""
    if not isinstance(x, Tensor):
        if isinstance(x, tuple) and isinstance(index, int | slice):
            return x[index]
        raise LossProblem("only tensors, shapes and results of several parts can be indexed")
    several = index if isinstance(index, tuple) else (index,)
    consumed = sum(each is not None and each is not ... for each in several)
    if consumed > x.ndim:
        raise LossProblem(f"{consumed} indices are too many for {shown(x.shape)}")
    axis, takes = 0, 0
    for each in several:
        if each is ...:
            axis += x.ndim - axis - _consumed_after_dots(several)
        elif each is None:
            x, axis = unsqueeze(trace, x, axis), axis + 1
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


def _consumed_after_dots(indices: Sequence[Any]) -> int:
    place = next(place for place, each in enumerate(indices) if each is ...)
    return sum(each is not None for each in indices[place + 1 :])


def _take(trace: Trace, x: Tensor, index: Tensor) -> Tensor:
    if category(index.dtype) != "i":
        raise LossProblem(
            "a tensor of bool as an index gives a result without a fixed shape; "
            "multiply by it, or use torch.where"
        )
    return _picked(trace, jnp.take, x, index, 0, (*index.shape, *x.shape[1:]))


def _element(trace: Trace, x: Tensor, index: Any, axis: int) -> Tensor:
    size, shape = x.shape[axis], x.shape[:axis] + x.shape[axis + 1 :]
    if isinstance(index, Tensor):
        if category(index.dtype) != "i":
            raise LossProblem("an index must be an integer")
        moved = permute(trace, x, (axis, *(other for other in range(x.ndim) if other != axis)))
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
    """Turn an index such as n - 1 into one from the end, such as -1."""
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
    return plus(size, bound) if bound < 0 else bound


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
