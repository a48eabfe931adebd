"""Arithmetic on Python's numbers in custom losses, where lengths stay lengths if possible."""

import operator

import jax.numpy as jnp
from jax import Array

from spmd_tx.worker.custom_loss.values import (
    Function,
    Length,
    LossProblem,
    Scalar,
    Tensor,
    Trace,
    TracedNumber,
    Value,
    stop,
)


def numbers(trace: Trace, function: Function, *values: Scalar) -> Scalar:
    """Apply Python's arithmetic. A length plus or minus a number, or times one, stays a length."""
    plain = [value for value in values if isinstance(value, bool | int | float)]
    if len(plain) == len(values):
        try:
            if function is operator.pow:  # powers of integers would take unbounded time
                plain = [float(value) for value in plain]
            return function(*plain)
        except (ArithmeticError, TypeError, ValueError) as error:
            raise LossProblem(f"{error}") from None
    length = _length(function, *values)
    if length is not None:
        return length
    arrays = [_array(trace, value, function is operator.truediv) for value in values]
    if len({array.dtype for array in arrays}) > 1:
        arrays = [array.astype(jnp.float64) for array in arrays]
    return TracedNumber(stop(function(*arrays)))


def _array(trace: Trace, value: Scalar, wants_float: bool) -> Array:
    if isinstance(value, Length):
        value = TracedNumber(trace.tokens * value.per_token + value.extra)
    if isinstance(value, TracedNumber):
        return value.value.astype(jnp.float64) if wants_float else value.value
    is_float = wants_float or isinstance(value, float)
    return jnp.asarray(value, jnp.float64 if is_float else jnp.int64)


def _length(function: Function, *values: Scalar) -> Length | int | None:
    as_lengths = [
        each if isinstance(each, Length) else Length(0, each) if type(each) is int else None
        for each in values
    ]
    if len(as_lengths) != 2 or None in as_lengths:
        return None
    one, other = as_lengths
    assert one is not None and other is not None  # noqa: PT018 (for the type checker)
    if function in (operator.add, operator.sub):
        sign = 1 if function is operator.add else -1
        made = Length(one.per_token + sign * other.per_token, one.extra + sign * other.extra)
    elif function is operator.mul and 0 in (one.per_token, other.per_token):
        factor, length = (one.extra, other) if one.per_token == 0 else (other.extra, one)
        made = Length(factor * length.per_token, factor * length.extra)
    else:
        return None
    if made.per_token == 0:
        return made.extra
    return made if made.per_token > 0 else None


def of_python(trace: Trace, function: Function, x: Value) -> Scalar:
    """Apply a function of Python's math to a number. The result has no gradient."""
    if isinstance(x, Tensor):
        if x.shape:
            raise LossProblem("math functions take numbers; use the function of torch of the same name")
        x = TracedNumber(stop(x.array).astype(jnp.float64))
    return TracedNumber(stop(function(_array(trace, x, True))))


def _math(function: Function) -> Function:
    return lambda trace, x: of_python(trace, function, x)


def _math_whole(function: Function) -> Function:
    return lambda trace, x: TracedNumber(
        function(_array(trace, of_python(trace, lambda y: y, x), True)).astype(jnp.int64)
    )


FUNCTIONS: dict[str, Function] = {
    **{
        f"math.{name}": _math(getattr(jnp, name))
        for name in "exp expm1 log log10 log1p log2 sqrt tanh".split()
    },
    "math.floor": _math_whole(jnp.floor),
    "math.ceil": _math_whole(jnp.ceil),
}
