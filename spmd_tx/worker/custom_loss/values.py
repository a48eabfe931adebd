"""Values of a custom loss while it is traced, for datums of one padded length; types promote as in torch.

A dimension over tokens is a Length: its true size is per_token * tokens + extra, where ``tokens`` differs
from datum to datum, and the array is wide enough for the longest datum. What lies beyond the true size is
padding of arbitrary value: every operation replaces it before use, so that neither padding nor the gradient
through it reaches real elements.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

MAX_ELEMENTS = 1 << 24  # of one value of one datum
MAX_WORK = 1 << 27  # elements of all values of one datum
COMPARISON = 8  # operations that a comparison in a sort counts as

# Harmless for every operation: within the domain of log, sqrt, acos, logit, division and their derivatives.
HARMLESS = {"f": 0.5, "i": 1, "b": False}


class LossProblem(Exception):
    """Says that a loss cannot be run on these shapes; the message is for its author."""


@dataclass(frozen=True)
class Length:
    """Holds a number of elements that depends on the number of tokens."""

    per_token: int
    extra: int

    def __str__(self) -> str:
        factor = "T" if self.per_token == 1 else f"{self.per_token}*T"
        return f"{factor}{self.extra:+d}" if self.extra else factor


Dim = int | Length
Function = Callable[..., Any]  # of a trace and values, or of arrays


@dataclass(frozen=True)
class Tensor:
    """Holds an array, and the shape that torch would see."""

    array: Array
    shape: tuple[Dim, ...]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    @property
    def is_floating(self) -> bool:
        return category(self.dtype) == "f"


@dataclass(frozen=True)
class TracedNumber:
    """Holds a Python number that is known only when the loss runs, such as the mean length."""

    value: Array  # float64 or int64, no dimensions


Scalar = bool | int | float | Length | TracedNumber
Value = Tensor | Scalar


class Need(NamedTuple):
    """Holds the least number of tokens of a datum that a node needs."""

    tokens: int
    node: str


@dataclass
class Trace:
    """Holds what all operations of one run share."""

    tokens: Array  # int64 [], of the datum
    bucket: int  # tokens that arrays have room for
    node: str = ""  # being run
    needs: list[Need] = field(default_factory=list)
    work: int = 0  # elements of all arrays so far
    operations: int = 0  # of arithmetic so far, roughly: at least one per element

    def size(self, dim: Dim) -> Array | int:
        """Return the datum's true size of the dimension."""
        if isinstance(dim, int):
            return dim
        return jnp.maximum(self.tokens * dim.per_token + dim.extra, 0)

    def width(self, dim: Dim) -> int:
        """Return the array's size of the dimension, padding included."""
        if isinstance(dim, int):
            return dim
        width = dim.per_token * self.bucket + dim.extra
        if width < 1:
            raise LossProblem(f"it takes {-dim.extra} tokens of a datum that has {self.bucket} or less")
        return width

    def widths(self, shape: Sequence[Dim]) -> tuple[int, ...]:
        return tuple(self.width(dim) for dim in shape)

    def require(self, size: Dim, least: int) -> None:
        """Require a dimension to have at least so many elements in every datum."""
        if isinstance(size, int):
            if size < least:
                raise LossProblem(f"it takes element {least} of {size}")
            return
        tokens = -(-(least - size.extra) // size.per_token)
        if tokens > 1:
            self.needs.append(Need(tokens, self.node))

    def tensor(self, array: Array, shape: Sequence[Dim]) -> Tensor:
        """Make a Tensor, within the limits. Raises LossProblem if it is too large."""
        shape = tuple(shape)
        assert array.shape == self.widths(shape), f"{array.shape} is not {shape}"
        if array.size > MAX_ELEMENTS:
            raise LossProblem(
                f"its value has {array.size} elements per datum; at most {MAX_ELEMENTS} are allowed"
            )
        self.spend(array.size)
        return Tensor(array, shape)

    def spend(self, work: int, operations: int = 0) -> None:
        """Count an operation's cost in elements, and its arithmetic beyond one operation per element."""
        self.work += work
        self.operations += work + operations
        if self.work > MAX_WORK:
            raise LossProblem(
                f"up to here, values have {self.work} elements per datum; at most {MAX_WORK} are allowed"
            )

    def mask(self, shape: Sequence[Dim]) -> Array | None:
        """Return which elements of an array are not padding; None: all."""
        mask = None
        for axis, dim in enumerate(shape):
            if isinstance(dim, Length):
                real = jnp.arange(self.width(dim)) < self.size(dim)
                real = jnp.reshape(real, [-1 if other == axis else 1 for other in range(len(shape))])
                mask = real if mask is None else mask & real
        return None if mask is None else jnp.broadcast_to(mask, self.widths(shape))

    def filled(self, x: Tensor, value: float | int | None = None) -> Array:
        """Return the array with padding replaced by a value; None: a harmless one."""
        mask = self.mask(x.shape)
        if mask is None:
            return x.array
        if value is None:
            value = HARMLESS[category(x.dtype)]
        return jnp.where(mask, x.array, jnp.asarray(value, x.dtype))

    def broadcast(self, x: Tensor, shape: Sequence[Dim]) -> Tensor:
        """Repeat along dimensions of size 1, as operations on several tensors do."""
        missing = (1,) * (len(shape) - x.ndim)
        array = jnp.broadcast_to(x.array.reshape(missing + x.array.shape), self.widths(shape))
        return self.tensor(array, shape)

    def as_tensor(self, value: Value, dtype: Any = None) -> Tensor:
        """Turn a number into a tensor without dimensions."""
        if isinstance(value, Tensor):
            return value if dtype is None else Tensor(value.array.astype(dtype), value.shape)
        if isinstance(value, Length):
            value = TracedNumber(self.tokens * value.per_token + value.extra)
        if isinstance(value, TracedNumber):
            return Tensor(value.value.astype(dtype or python_dtype(value)), ())
        return Tensor(jnp.asarray(value, dtype or python_dtype(value)), ())


def category(dtype: Any) -> str:
    """Return "f", "i" or "b"."""
    if jnp.issubdtype(dtype, jnp.floating):
        return "f"
    return "b" if dtype == np.bool_ else "i"


def python_dtype(value: Scalar) -> np.dtype:
    """Return the type that torch gives a Python number."""
    if isinstance(value, bool):
        return np.dtype(np.bool_)
    if isinstance(value, TracedNumber):
        return np.dtype(np.float32 if category(value.value.dtype) == "f" else np.int64)
    return np.dtype(np.float32 if isinstance(value, float) else np.int64)


def result_type(*values: Value) -> np.dtype:
    """Promote as torch does: tensors with dimensions before those without, before Python numbers."""
    with_dimensions = [each.dtype for each in values if isinstance(each, Tensor) and each.ndim]
    without = [each.dtype for each in values if isinstance(each, Tensor) and not each.ndim]
    numbers = [python_dtype(each) for each in values if not isinstance(each, Tensor)]
    return _combine(_join(with_dimensions), _combine(_join(without), _join(numbers)))


def _combine(higher: np.dtype | None, lower: np.dtype | None) -> np.dtype:
    if higher is None or lower is None:
        dtype = lower if higher is None else higher
        return np.dtype(np.bool_) if dtype is None else dtype
    order = "bif"
    return lower if order.index(category(lower)) > order.index(category(higher)) else higher


def _join(dtypes: Sequence[np.dtype]) -> np.dtype | None:
    return reduce(promote, dtypes) if dtypes else None


def promote(one: np.dtype, other: np.dtype) -> np.dtype:
    """Return the type that holds both."""
    with jax.numpy_dtype_promotion("standard"):
        return np.dtype(jnp.promote_types(one, other))


def floating(dtype: np.dtype) -> np.dtype:
    """Return the type in which functions such as exp compute: float32 for integers."""
    return dtype if category(dtype) == "f" else np.dtype(np.float32)


def common_shape(shapes: Sequence[tuple[Dim, ...]]) -> tuple[Dim, ...]:
    """Return the shape that tensors broadcast to."""
    ndim = max(map(len, shapes))
    aligned = [(1,) * (ndim - len(shape)) + shape for shape in shapes]
    return tuple(_common_dim(dims, shapes) for dims in zip(*aligned, strict=True))


def _common_dim(dims: tuple[Dim, ...], shapes: Sequence[tuple[Dim, ...]]) -> Dim:
    others = {dim for dim in dims if dim != 1}
    if len(others) > 1:
        raise LossProblem(f"the shapes {' and '.join(map(shown, shapes))} do not fit together")
    return others.pop() if others else 1


def shown(shape: Sequence[Dim]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def axis_of(dim: Any, ndim: int) -> int:
    """Resolve a dimension that torch counts from either end."""
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise LossProblem(f"a dimension must be a plain integer, not {type(dim).__name__}")
    room = max(ndim, 1)
    if not -room <= dim < room:
        raise LossProblem(f"there is no dimension {dim} among {ndim}")
    return dim % room


def axes_of(dims: Any, ndim: int) -> tuple[int, ...]:
    """Resolve one dimension, several, or all."""
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return tuple(range(ndim))
    several = dims if isinstance(dims, list | tuple) else [dims]
    return tuple(sorted({axis_of(dim, ndim) for dim in several}) if ndim else ())


def elements(shape: Sequence[Dim], trace: Trace) -> Array | int:
    """Return the number of elements of a datum."""
    sizes = [trace.size(dim) for dim in shape]
    return (
        prod(sizes)
        if all(isinstance(size, int) for size in sizes)
        else jnp.prod(jnp.stack([jnp.asarray(size, jnp.int64) for size in sizes]))
    )


def rounds(x: Tensor, axis: int) -> int:
    """Return how often a sort or an accumulation reads each element."""
    return x.array.shape[axis].bit_length() if x.ndim else 1


def stop(x: Array) -> Array:
    return jax.lax.stop_gradient(x)
