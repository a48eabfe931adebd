"""How checkpoints store matrices in fewer bits: which tensors hold one, and in which shapes."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class DeclaredTensor:
    """Declares one tensor of a checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors names it


@dataclass(frozen=True)
class Fp8Blocks:
    """Declares float8_e4m3 numbers times a scale per block. The last blocks may be smaller."""

    rows: int = 128
    columns: int = 128

    of_byte = 1  # numbers in a byte

    @property
    def group(self) -> int:
        """How many inputs share a scale."""
        return self.columns

    def parts(self, name: str, shape: tuple[int, ...]) -> tuple[DeclaredTensor, DeclaredTensor]:
        """Return numbers and scales of a matrix [..., out, in] that is called ``name``."""
        *lead, rows, columns = shape
        blocks = (*lead, math.ceil(rows / self.rows), math.ceil(columns / self.columns))
        return DeclaredTensor(name, shape, "F8_E4M3"), DeclaredTensor(f"{name}_scale_inv", blocks, "F32")


@dataclass(frozen=True)
class Mxfp4:
    """Declares 4-bit floats (e2m1), two in a byte, the lower half first, times a power of two per group."""

    group: int = 32  # inputs that share a scale

    of_byte = 2

    def parts(self, name: str, shape: tuple[int, ...]) -> tuple[DeclaredTensor, DeclaredTensor]:
        """Return numbers and scales of matrices [..., out, in] that are called ``name``."""
        *lead, columns = shape
        groups = (*lead, columns // self.group)
        blocks = DeclaredTensor(f"{name}_blocks", (*groups, self.group // 2), "U8")
        return blocks, DeclaredTensor(f"{name}_scales", groups, "U8")


@dataclass(frozen=True)
class Int4Groups:
    """Declares integers from -8 to 7, eight in an int32 and the lowest bits first, times a scale per group.

    They are stored plus 8, as compressed-tensors packs them.
    """

    group: int = 32  # inputs that share a scale

    of_byte = 2

    def parts(self, name: str, shape: tuple[int, ...]) -> tuple[DeclaredTensor, DeclaredTensor]:
        """Return numbers and scales of a matrix [..., out, in] that is called ``name``."""
        *lead, columns = shape
        packed = DeclaredTensor(f"{name}_packed", (*lead, columns // 8), "I32")
        return packed, DeclaredTensor(f"{name}_scale", (*lead, columns // self.group), "BF16")


Encoding = Fp8Blocks | Mxfp4 | Int4Groups


@dataclass(frozen=True)
class Int8Groups:
    """Declares integers from -127 to 127, stored plus 128, times a scale per group."""

    group: int = 32  # inputs that share a scale

    of_byte = 1


DeviceEncoding = Encoding | Int8Groups  # in which devices keep matrices
# By --base-dtype: what matrices that a checkpoint stores as floating-point numbers are encoded in.
BASE_DTYPES: dict[str, DeviceEncoding] = {
    "int8": Int8Groups(),
    "fp8": Fp8Blocks(rows=1, columns=64),
    "int4": Int4Groups(),
}


def problem(encoding: Encoding, shape: tuple[int, ...]) -> str | None:
    """Say why a matrix of this shape cannot be encoded so, or return None."""
    if not isinstance(encoding, Fp8Blocks) and shape[-1] % encoding.group:
        return f"rows of {shape[-1]} numbers are not a multiple of {encoding.group}, which share a scale"
    return None
