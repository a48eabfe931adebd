"""Reductions, sorts and losses over elements in custom losses; padding adds nothing."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from spmd_tx.worker.custom_loss.elementwise import FUNCTIONS as ELEMENTWISE
from spmd_tx.worker.custom_loss.elementwise import apply, as_bool, cast, constant, floats
from spmd_tx.worker.custom_loss.values import (
    COMPARISON,
    Dim,
    Function,
    LossProblem,
    Tensor,
    Trace,
    Value,
    axes_of,
    axis_of,
    category,
    elements,
    floating,
    result_type,
    rounds,
)

TensorPair = tuple[Tensor, Tensor]


def _reduced_shape(shape: Sequence[Dim], axes: tuple[int, ...], keepdim: bool | None) -> tuple[Dim, ...]:
    if keepdim:
        return tuple(1 if axis in axes else dim for axis, dim in enumerate(shape))
    return tuple(dim for axis, dim in enumerate(shape) if axis not in axes)


def _reduce(
    trace: Trace, function: Function, x: Tensor, dim: Any, keepdim: bool | None, neutral: float | int
) -> Tensor:
    axes = axes_of(dim, x.ndim)
    array = function(trace.filled(x, neutral), axis=axes, keepdims=bool(keepdim))
    return trace.tensor(array, _reduced_shape(x.shape, axes, keepdim))


def _summable(x: Tensor, dtype: Any) -> Tensor:
    """Cast to the type of a sum: int64 for integers and bools."""
    if dtype is not None:
        return cast(x, dtype)
    return x if x.is_floating else cast(x, jnp.int64)


def _sum(trace: Trace, x: Tensor, dim: Any = None, keepdim: bool | None = None, dtype: Any = None) -> Tensor:
    return _reduce(trace, jnp.sum, _summable(x, dtype), dim, keepdim, 0)


def _count(trace: Trace, x: Tensor, dim: Any) -> Array:
    shape = [x.shape[axis] for axis in axes_of(dim, x.ndim)]
    return jnp.asarray(elements(shape, trace), jnp.int64)


def _mean(trace: Trace, x: Tensor, dim: Any = None, keepdim: bool | None = None, dtype: Any = None) -> Tensor:
    x = x if dtype is None else cast(x, dtype)
    if not x.is_floating:
        raise LossProblem(f"torch takes no mean of {x.dtype}; use .float() first")
    total, count = _sum(trace, x, dim, keepdim), _count(trace, x, dim)
    return trace.tensor(total.array / count.astype(x.dtype), total.shape)


def _prod(trace: Trace, x: Tensor, dim: Any = None, keepdim: bool | None = None) -> Tensor:
    return _reduce(trace, jnp.prod, _summable(x, None), dim, keepdim, 1)


def _neutral(name: str, x: Tensor) -> float | int:
    """Return what does not change the "max" or "min" of other elements."""
    kind, is_max = category(x.dtype), name == "max"
    if kind == "f":
        return -jnp.inf if is_max else jnp.inf
    if kind == "b":
        return not is_max
    return jnp.iinfo(x.dtype).min if is_max else jnp.iinfo(x.dtype).max


def _most(name: str, trace: Trace, x: Tensor, dim: Any = None, keepdim: bool | None = None) -> Tensor:
    _require_some(trace, x, dim)
    return _reduce(trace, getattr(jnp, name), x, dim, keepdim, _neutral(name, x))


def _require_some(trace: Trace, x: Tensor, dim: Any) -> None:
    for axis in axes_of(dim, x.ndim):
        trace.require(x.shape[axis], 1)


def _extreme(name: str, trace: Trace, x: Tensor, dim: Any = None, keepdim: bool | None = None) -> Any:
    """Return the extreme of all elements, along one dimension (with indices), or of two tensors."""
    if isinstance(dim, Tensor):
        return ELEMENTWISE["maximum" if name == "max" else "minimum"](trace, x, dim)
    if dim is None:
        return _most(name, trace, x)
    places = _arg(name, trace, x, dim, keepdim=True)
    values = jnp.take_along_axis(x.array, places.array, axis_of(dim, x.ndim)) if x.ndim else x.array
    both = trace.tensor(values, places.shape), places
    return both if keepdim else tuple(_without(trace, each, axis_of(dim, x.ndim)) for each in both)


def _without(trace: Trace, x: Tensor, axis: int) -> Tensor:
    if not x.ndim:
        return x
    return trace.tensor(jnp.squeeze(x.array, axis), x.shape[:axis] + x.shape[axis + 1 :])


def _arg(name: str, trace: Trace, x: Tensor, dim: Any = None, keepdim: bool | None = None) -> Tensor:
    function = jnp.argmax if name == "max" else jnp.argmin
    filled = trace.filled(x, _neutral(name, x))
    _require_some(trace, x, dim)
    if dim is None:
        if sum(not isinstance(size, int) for size in x.shape[1:]):
            raise LossProblem("over several dimensions, it takes tokens as the first one only")
        return Tensor(function(filled).astype(jnp.int64), ())
    axis = axis_of(dim, x.ndim)
    if not x.ndim:
        return Tensor(jnp.zeros((), jnp.int64), ())
    places = function(filled, axis=axis, keepdims=bool(keepdim)).astype(jnp.int64)
    return trace.tensor(places, _reduced_shape(x.shape, (axis,), keepdim))


def _of_bools(function: Function, neutral: bool) -> Function:
    return lambda trace, x, dim=None, keepdim=None: _reduce(
        trace, function, as_bool(trace, x), dim, keepdim, neutral
    )


def _logsumexp(trace: Trace, x: Tensor, dim: Any, keepdim: bool | None = None) -> Tensor:
    x = cast(x, floating(x.dtype))
    return _reduce(trace, jax.nn.logsumexp, x, dim, keepdim, -jnp.inf)


def _var(
    trace: Trace,
    x: Tensor,
    dim: Any = None,
    unbiased: bool | None = None,
    keepdim: bool | None = None,
    correction: Any = None,
) -> Tensor:
    if isinstance(dim, bool):  # x.var(False)
        dim, unbiased = None, dim
    fewer = constant(correction, 0.0 if unbiased is False else 1.0)
    mean = _mean(trace, x, dim, keepdim=True)
    squares = apply(trace, lambda a, b: jnp.square(a - b), x, mean)
    total = _sum(trace, squares, dim, keepdim)
    count = _count(trace, x, dim).astype(x.dtype) - fewer
    return trace.tensor(total.array / jnp.maximum(count, 0), total.shape)


def _std(trace: Trace, x: Tensor, dim: Any = None, **more: Any) -> Tensor:
    return floats(jnp.sqrt)(trace, _var(trace, x, dim, **more))


def _norm(
    trace: Trace, x: Tensor, p: Any = None, dim: Any = None, keepdim: bool | None = None, dtype: Any = None
) -> Tensor:
    """Return a norm, whose gradient is 0 where it is 0."""
    x = x if dtype is None else cast(x, dtype)
    order = constant(p, 2.0)
    sizes = ELEMENTWISE["abs"](trace, x)
    if order == 1:
        return _sum(trace, sizes, dim, keepdim)
    if order == float("inf"):
        return _most("max", trace, sizes, dim, keepdim)
    if order != 2:
        raise LossProblem(f"p is {order:g}; it takes 1, 2 or inf")
    total = _sum(trace, apply(trace, jnp.square, x), dim, keepdim)
    is_zero = total.array == 0
    root = jnp.sqrt(jnp.where(is_zero, 1, total.array))
    return trace.tensor(jnp.where(is_zero, 0, root), total.shape)


def _softmax(function: Function) -> Function:
    def run(trace: Trace, x: Tensor, dim: Any = None, dtype: Any = None, _stacklevel: Any = None) -> Tensor:
        if dim is None:
            raise LossProblem("it needs dim")
        x = cast(x, floating(x.dtype) if dtype is None else dtype)
        if not x.ndim:
            x, dim = trace.tensor(x.array[None], (1,)), 0
            return _without(trace, run(trace, x, dim), 0)
        array = function(trace.filled(x, -jnp.inf), axis=axis_of(dim, x.ndim))
        return trace.tensor(array, x.shape)

    return run


def _cumulative(function: Function, neutral: float | int) -> Function:
    def run(trace: Trace, x: Tensor, dim: Any, dtype: Any = None) -> Tensor:
        x = _summable(x, dtype)
        if not x.ndim:
            return x
        axis = axis_of(dim, x.ndim)
        trace.spend(0, rounds(x, axis) * x.array.size)
        return trace.tensor(function(trace.filled(x, neutral), axis=axis), x.shape)

    return run


def _sort(trace: Trace, x: Tensor, dim: Any = -1, descending: Any = None, stable: Any = None) -> TensorPair:
    axis = axis_of(dim, x.ndim)
    trace.spend(0, COMPARISON * rounds(x, axis) * x.array.size)
    filled = trace.filled(x, _neutral("max" if descending else "min", x))
    places = jnp.argsort(filled, axis=axis, stable=True, descending=bool(descending)).astype(jnp.int64)
    return trace.tensor(jnp.take_along_axis(x.array, places, axis), x.shape), trace.tensor(places, x.shape)


def _topk(
    trace: Trace, x: Tensor, k: Any, dim: Any = -1, largest: Any = True, sorted: Any = None
) -> TensorPair:
    axis = axis_of(dim, x.ndim)
    if not isinstance(k, int) or k < 1:
        raise LossProblem("k must be a plain integer, at least 1")
    trace.require(x.shape[axis], k)
    values, places = _sort(trace, x, dim, descending=largest is not False)
    shape = (*x.shape[:axis], k, *x.shape[axis + 1 :])
    values, places = (lax.slice_in_dim(each.array, 0, k, axis=axis) for each in (values, places))
    return trace.tensor(values, shape), trace.tensor(places, shape)


def finish(trace: Trace, losses: Tensor, reduction: str | None, batch: Dim = 1) -> Tensor:
    """Apply the reduction of a loss in torch.nn.functional."""
    match reduction or "mean":
        case "none":
            return losses
        case "sum":
            return _sum(trace, losses)
        case "mean":
            return _mean(trace, losses)
    return apply(
        trace, lambda total, count: total / count, _sum(trace, losses), trace.as_tensor(batch, losses.dtype)
    )


def _loss(function: Callable[..., Array]) -> Function:
    """Make a loss of input and target, with parameters that are plain numbers."""

    def run(trace: Trace, input: Tensor, target: Tensor, reduction: str | None = None, **more: Any) -> Tensor:
        fixed = {name: constant(value, 1.0) for name, value in more.items() if value is not None}
        dtype = result_type(input, target)
        return finish(trace, apply(trace, partial(function, **fixed), input, target, dtype=dtype), reduction)

    return run


def _smooth(x: Array, y: Array, beta: float = 1.0) -> Array:
    size = jnp.abs(x - y)
    if beta == 0:
        return size
    return jnp.where(size < beta, 0.5 * jnp.square(x - y) / beta, size - 0.5 * beta)


def _huber(x: Array, y: Array, delta: float = 1.0) -> Array:
    size = jnp.abs(x - y)
    return jnp.where(size <= delta, 0.5 * jnp.square(x - y), delta * (size - 0.5 * delta))


def _kl_div(
    trace: Trace, input: Tensor, target: Tensor, reduction: str | None = None, log_target: bool | None = None
) -> Tensor:
    def pointwise(x: Array, y: Array) -> Array:
        if log_target:
            return jnp.exp(y) * (y - x)
        return jax.scipy.special.xlogy(y, y) - y * x

    losses = apply(trace, pointwise, input, target, dtype=result_type(input, target))
    return finish(trace, losses, reduction, input.shape[0] if input.ndim else 1)


def _bce_with_logits(
    trace: Trace,
    input: Tensor,
    target: Tensor,
    weight: Value | None = None,
    reduction: str | None = None,
    pos_weight: Value | None = None,
) -> Tensor:
    def pointwise(x: Array, y: Array, each: Array, positive: Array) -> Array:
        return each * -(positive * y * jax.nn.log_sigmoid(x) + (1 - y) * jax.nn.log_sigmoid(-x))

    weights = [1.0 if each is None else each for each in (weight, pos_weight)]
    return finish(trace, apply(trace, pointwise, input, target, *weights, dtype=input.dtype), reduction)


def _bce(
    trace: Trace, input: Tensor, target: Tensor, weight: Value | None = None, reduction: str | None = None
) -> Tensor:
    """Return binary cross entropy; as in torch, logarithms are at least -100."""

    def pointwise(x: Array, y: Array, each: Array) -> Array:
        positive, negative = jnp.maximum(jnp.log(x), -100), jnp.maximum(jnp.log1p(-x), -100)
        return -each * (y * positive + (1 - y) * negative)

    weights = 1.0 if weight is None else weight
    return finish(trace, apply(trace, pointwise, input, target, weights, dtype=input.dtype), reduction)


FUNCTIONS: dict[str, Function] = {
    "sum": _sum,
    "mean": _mean,
    "prod": _prod,
    "amax": partial(_most, "max"),
    "amin": partial(_most, "min"),
    "max": partial(_extreme, "max"),
    "min": partial(_extreme, "min"),
    "argmax": partial(_arg, "max"),
    "argmin": partial(_arg, "min"),
    "any": _of_bools(jnp.any, False),
    "all": _of_bools(jnp.all, True),
    "count_nonzero": lambda trace, x, dim=None: _sum(trace, as_bool(trace, x), dim),
    "logsumexp": _logsumexp,
    "var": _var,
    "std": _std,
    "norm": _norm,
    "softmax": _softmax(jax.nn.softmax),
    "softmax_function": _softmax(jax.nn.softmax),
    "log_softmax": _softmax(jax.nn.log_softmax),
    "log_softmax_function": _softmax(jax.nn.log_softmax),
    "cumsum": _cumulative(jnp.cumsum, 0),
    "cumprod": _cumulative(jnp.cumprod, 1),
    "sort": _sort,
    "topk": _topk,
    "kl_div": _kl_div,
    "mse_loss": _loss(lambda x, y: jnp.square(x - y)),
    "l1_loss": _loss(lambda x, y: jnp.abs(x - y)),
    "smooth_l1_loss": _loss(_smooth),
    "huber_loss": _loss(_huber),
    "binary_cross_entropy_with_logits": _bce_with_logits,
    "binary_cross_entropy": _bce,
}
