"""The types of HLO values: arrays, and tuples of arrays, with their size and memory space."""

import math
import re
from dataclasses import dataclass
from functools import cache

BITS = {
    "pred": 8,
    "token": 0,
    "opaque": 0,
    **{f"{sign}{bits}": bits for sign in "su" for bits in (2, 4, 8, 16, 32, 64)},
    **{f"f{bits}": bits for bits in (16, 32, 64)},
    "bf16": 16,
    "c64": 64,
    "c128": 128,
}
EIGHT_BITS = re.compile(r"f8e\w+")
ARRAY = re.compile(r"\b([a-z]+[0-9]*[a-z0-9]*)\[([\d,<= ]*)\](?:\{([^}]*)\})?")
SPACE = re.compile(r"S\((\d+)\)")


@dataclass(frozen=True)
class HloArray:
    """Holds the type of an array."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0  # 0: the device's main memory; others are on the chip, or on the host

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> float:
        return self.elements * bits_of(self.dtype) / 8

    @property
    def memory_bytes(self) -> float:
        """The bytes in the device's main memory."""
        return 0.0 if self.space else self.bytes


def bits_of(dtype: str) -> int:
    if EIGHT_BITS.fullmatch(dtype):
        return 8
    return BITS.get(dtype, 4 if dtype.startswith("f4") else 0)


@cache
def arrays_of(text: str) -> tuple[HloArray, ...]:
    """Return the arrays of a type as HLO writes it, those of a tuple one after the other.

    A dimension with a bound, as in ``f32[<=8]``, counts with its bound.
    """
    arrays = []
    for dtype, dims, layout in ARRAY.findall(text):
        if dtype not in BITS and not dtype.startswith(("f8", "f4")):
            continue
        sizes = tuple(int(size.replace("<=", "")) for size in dims.split(",") if size.strip())
        space = SPACE.search(layout)
        arrays.append(HloArray(dtype, sizes, int(space[1]) if space else 0))
    return tuple(arrays)


def memory_bytes_of(text: str) -> float:
    """Return the bytes of a type that lie in the device's main memory."""
    return sum(array.memory_bytes for array in arrays_of(text))
