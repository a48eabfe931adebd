"""Elementwise operations of custom losses, with torch's results and gradients."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.special import xlogy

from spmd_tx.worker.custom_loss.numbers import numbers
from spmd_tx.worker.custom_loss.values import (
    Function,
    Length,
    LossProblem,
    Scalar,
    Tensor,
    Trace,
    TracedNumber,
    Value,
    category,
    common_shape,
    floating,
    result_type,
    stop,
)

COMPARISONS = operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge


def apply(trace: Trace, function: Function, *values: Value, dtype: Any = None) -> Tensor:
    """Bring tensors to one shape and type (None: leave the types), and run an array function on them."""
    tensors = [trace.as_tensor(value, dtype) for value in values]
    shape = common_shape([each.shape for each in tensors])
    arrays = [trace.filled(trace.broadcast(each, shape)) for each in tensors]
    return trace.tensor(function(*arrays), shape)


def floats(function: Function) -> Function:
    """Make an operation on one tensor; integers become float32."""
    return lambda trace, x, **_: apply(trace, function, x, dtype=floating(x.dtype))


def same(function: Function) -> Function:
    """Make an operation on one tensor whose result has its type, or is bool."""
    return lambda trace, x: apply(trace, function, x)


def rounding(function: Function) -> Function:
    """Make a rounding operation, which leaves integers as they are."""
    return lambda trace, x: apply(trace, function, x) if x.is_floating else x


def pair(function: Function, of_numbers: Function | None = None, *, floating_only: bool = False) -> Function:
    """Make an operation on two values, which are promoted to one type."""

    def run(trace: Trace, x: Value, other: Value) -> Value:
        if not isinstance(x, Tensor) and not isinstance(other, Tensor):
            if of_numbers is None:
                raise LossProblem("it takes a tensor")
            return numbers(trace, of_numbers, x, other)
        dtype = result_type(x, other)
        return apply(trace, function, x, other, dtype=floating(dtype) if floating_only else dtype)

    return run


def _add(trace: Trace, x: Value, other: Value, alpha: Scalar = 1) -> Value:
    return _plus(operator.add, trace, x, other, alpha)


def _sub(trace: Trace, x: Value, other: Value, alpha: Scalar = 1) -> Value:
    for each in (x, other):
        if isinstance(each, Tensor) and each.dtype == jnp.bool_:
            raise LossProblem("tensors of bool cannot be subtracted; use ~ or logical_xor")
    return _plus(operator.sub, trace, x, other, alpha)


def _plus(function: Function, trace: Trace, x: Value, other: Value, alpha: Scalar) -> Value:
    if alpha != 1:
        other = _mul(trace, other, alpha)
    if not isinstance(x, Tensor) and isinstance(other, Length | int) and isinstance(x, Length | int):
        return numbers(trace, function, x, other)
    return pair(_with_bool(function, jnp.logical_or), function)(trace, x, other)


def _with_bool(function: Function, of_bool: Function) -> Function:
    """torch adds bools by or, and multiplies them by and."""
    return lambda x, y: of_bool(x, y) if x.dtype == jnp.bool_ else function(x, y)


_mul = pair(_with_bool(operator.mul, jnp.logical_and), operator.mul)
_true_div = pair(operator.truediv, operator.truediv, floating_only=True)
_floor_div = pair(jnp.floor_divide, operator.floordiv)


def _div(trace: Trace, x: Value, other: Value, rounding_mode: str | None = None) -> Value:
    if rounding_mode == "floor":
        return _floor_div(trace, x, other)
    quotient = _true_div(trace, x, other)
    if rounding_mode == "trunc":
        assert isinstance(quotient, Tensor)
        return trace.as_tensor(apply(trace, jnp.trunc, quotient), result_type(x, other))
    return quotient


def _pow(trace: Trace, x: Value, exponent: Value) -> Value:
    if type(exponent) is int and isinstance(x, Tensor) and (x.is_floating or exponent >= 0):
        dtype = result_type(x, exponent)
        return apply(trace, lambda array: lax.integer_pow(array, exponent), x, dtype=dtype)
    return pair(jnp.power, operator.pow)(trace, x, exponent)


def _bits(of_ints: Function, of_bools: Function) -> Function:
    return pair(_with_bool(of_ints, of_bools), of_ints)


def _logical(function: Function) -> Function:
    return lambda trace, x, other: apply(trace, function, as_bool(trace, x), as_bool(trace, other))


def as_bool(trace: Trace, x: Tensor) -> Tensor:
    return x if x.dtype == jnp.bool_ else apply(trace, lambda array: array != 0, x)


def _clamp(trace: Trace, x: Tensor, min: Value | None = None, max: Value | None = None) -> Tensor:
    """Clamp as torch does: at the bounds, the gradient is that of values within."""
    if min is None and max is None:
        raise LossProblem("it takes min, max or both")
    limits = [each for each in (min, max) if each is not None]
    dtype = result_type(x, *limits)

    def run(array: Array, *bounds: Array) -> Array:
        low = bounds[0] if min is not None else None
        high = bounds[-1] if max is not None else None
        if low is not None:
            array = jnp.where(array < low, low, array)
        return array if high is None else jnp.where(array > high, high, array)

    return apply(trace, run, x, *limits, dtype=dtype)


def _where(trace: Trace, condition: Tensor, x: Value, other: Value) -> Tensor:
    dtype = result_type(x, other)
    tensors = [trace.as_tensor(x, dtype), trace.as_tensor(other, dtype)]
    return apply(trace, jnp.where, as_bool(trace, condition), *tensors)


def _masked_fill(trace: Trace, x: Tensor, mask: Tensor, value: Value) -> Tensor:
    if mask.dtype != jnp.bool_:
        raise LossProblem(f"the mask is of {mask.dtype}; it must be of bool, as mask > 0 is")
    return _where(trace, mask, trace.as_tensor(value, x.dtype), x)


def _lerp(trace: Trace, x: Tensor, end: Tensor, weight: Value) -> Tensor:
    dtype = result_type(x, end, weight)
    return apply(trace, lambda a, b, w: a + w * (b - a), x, end, weight, dtype=dtype)


def _nan_to_num(trace: Trace, x: Tensor, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Tensor:
    numbers = [each for each in (nan, posinf, neginf) if isinstance(each, Length | TracedNumber | Tensor)]
    if numbers:
        raise LossProblem("its values must be plain numbers")
    if not x.is_floating:
        return x
    return apply(trace, lambda array: jnp.nan_to_num(array, nan=nan or 0.0, posinf=posinf, neginf=neginf), x)


def _itself(trace: Trace, x: Tensor, **_: Any) -> Tensor:
    return x


def constant(value: Any, default: float) -> float:
    """Return a parameter that must be known when the loss is compiled."""
    if value is None:
        return default
    if not isinstance(value, int | float):
        raise LossProblem("its parameters must be plain numbers")
    return float(value)


def _softplus(trace: Trace, x: Tensor, beta: Any = None, threshold: Any = None) -> Tensor:
    slope, most = constant(beta, 1.0), constant(threshold, 20.0)

    def run(array: Array) -> Array:
        scaled = array * slope
        bounded = jnp.where(scaled > most, 0.0, scaled)
        return jnp.where(scaled > most, array, jnp.logaddexp(bounded, jnp.zeros_like(bounded)) / slope)

    return apply(trace, run, x, dtype=floating(x.dtype))


def _elu(trace: Trace, x: Tensor, alpha: Any = None, inplace: Any = None) -> Tensor:
    return apply(trace, lambda array: jax.nn.elu(array, constant(alpha, 1.0)), x, dtype=floating(x.dtype))


def _leaky_relu(trace: Trace, x: Tensor, negative_slope: Any = None, inplace: Any = None) -> Tensor:
    slope = constant(negative_slope, 0.01)
    return apply(trace, lambda array: jnp.where(array > 0, array, array * slope), x)


def _gelu(trace: Trace, x: Tensor, approximate: str | None = None) -> Tensor:
    return apply(trace, lambda array: jax.nn.gelu(array, approximate=approximate == "tanh"), x)


def _logit(trace: Trace, x: Tensor, eps: Any = None) -> Tensor:
    if eps is not None:
        bound = constant(eps, 0.0)
        x = _clamp(trace, x, bound, 1 - bound)
    return floats(lambda array: jnp.log(array / (1 - array)))(trace, x)


def _bitwise_not(trace: Trace, x: Tensor) -> Tensor:
    return apply(trace, jnp.logical_not if x.dtype == jnp.bool_ else jnp.bitwise_not, x)


def _unary(function: Function, of_numbers: Function) -> Function:
    return lambda trace, x: (
        apply(trace, function, x) if isinstance(x, Tensor) else numbers(trace, of_numbers, x)
    )


def _cast(name: str) -> Function:
    return lambda trace, x: cast(x, name)


def cast(x: Tensor, dtype: Any) -> Tensor:
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bool_:
        return Tensor(x.array != 0, x.shape)
    if x.is_floating and category(dtype) == "i":
        return Tensor(stop(x.array).astype(dtype), x.shape)
    return Tensor(x.array.astype(dtype), x.shape)


FUNCTIONS: dict[str, Function] = {
    **{
        name: floats(getattr(jnp, name))
        for name in "asinh atan cos cosh exp2 log10 log2 sin sinh sqrt tan tanh".split()
    },
    **{name: floats(getattr(jnp, f"arc{name[1:]}")) for name in ("acos", "asin")},
    **{name: floats(getattr(jnp, name)) for name in "exp expm1 log log1p".split()},
    **{name: rounding(getattr(jnp, name)) for name in "ceil floor round trunc".split()},
    **{name: same(getattr(jnp, name)) for name in "isfinite isinf isnan sign".split()},
    "abs": _unary(jnp.abs, abs),
    "neg": _unary(jnp.negative, operator.neg),
    "positive": _unary(lambda array: array, operator.pos),
    "bitwise_not": _bitwise_not,
    "logical_not": lambda trace, x: apply(trace, jnp.logical_not, as_bool(trace, x)),
    "erf": floats(lax.erf),
    "reciprocal": floats(lambda array: 1 / array),
    "rsqrt": floats(lax.rsqrt),
    "square": same(jnp.square),
    "sigmoid": floats(jax.nn.sigmoid),
    "silu": floats(jax.nn.silu),
    "logsigmoid": floats(jax.nn.log_sigmoid),
    "relu": lambda trace, x, inplace=None: apply(trace, jax.nn.relu, x),
    "elu": _elu,
    "leaky_relu": _leaky_relu,
    "gelu": _gelu,
    "softplus": _softplus,
    "logit": _logit,
    "add": _add,
    "sub": _sub,
    "rsub": lambda trace, x, other, alpha=1: _sub(trace, other, x, alpha),
    "mul": _mul,
    "div": _div,
    "floor_divide": _floor_div,
    "remainder": pair(jnp.remainder, operator.mod),
    "pow": _pow,
    **{each.__name__: pair(each, each) for each in COMPARISONS},
    "bitwise_and": _bits(operator.and_, jnp.logical_and),
    "bitwise_or": _bits(operator.or_, jnp.logical_or),
    "bitwise_xor": _bits(operator.xor, jnp.logical_xor),
    **{name: _logical(getattr(jnp, name)) for name in "logical_and logical_or logical_xor".split()},
    **{name: pair(getattr(jnp, name)) for name in "maximum minimum fmax fmin".split()},
    "atan2": pair(jnp.arctan2, floating_only=True),
    "logaddexp": pair(jnp.logaddexp, floating_only=True),
    "xlogy": pair(xlogy, floating_only=True),
    "clamp": _clamp,
    "clamp_min": lambda trace, x, min: _clamp(trace, x, min=min),
    "clamp_max": lambda trace, x, max: _clamp(trace, x, max=max),
    "where": _where,
    "where_method": lambda trace, x, condition, other: _where(trace, condition, x, other),
    "masked_fill": _masked_fill,
    "lerp": _lerp,
    "nan_to_num": _nan_to_num,
    "detach": lambda trace, x: Tensor(stop(x.array), x.shape),
    "clone": _itself,
    "contiguous": _itself,
    "cpu": _itself,
    **{name: _cast(name) for name in ("float32", "float64", "int64", "int32", "bool", "float16", "bfloat16")},
}
FUNCTIONS |= {
    alias: FUNCTIONS[name]
    for alias, name in {
        "float": "float32",
        "double": "float64",
        "long": "int64",
        "int": "int32",
        "half": "float16",
    }.items()
}
