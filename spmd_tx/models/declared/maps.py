"""Linear maps and other arrays of a model, each declared once.

From a declaration follow the array and its sharding, its adapter, how it is read from a checkpoint, the names
in files of adapters, and sizes for plans.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

# How tp splits a map: its outputs, its inputs (partial results are then added up), or not at all.
Split = Literal["columns", "rows", "whole"]
# The flag (train_attn, ...) that an adapter of the map follows.
AdapterGroup = Literal["attn", "mlp", "unembed"]


@dataclass(frozen=True)
class TensorSource:
    """Says which tensor of a checkpoint holds an array, or which rows of one."""

    name: str  # "{layer}" and "{expert}" stand for their numbers
    transposed: bool = False  # stored as [out, in], computed with as [in, out]
    rows: tuple[int, int, int] | None = None  # first, end and step, along the stored outputs; None: all
    stacked: bool = False  # one tensor holds all experts, along its first dimension
    encoding: Any = None  # how numbers are stored, of encoding.py; None: as floating-point numbers

    def part(self, start: int, stop: int) -> "TensorSource":
        """Return the rows from ``start`` on, before ``stop``: one of the maps that a tensor fuses."""
        return replace(self, rows=(start, stop, 1))

    def every(self, step: int, first: int, count: int) -> "TensorSource":
        """Return each ``step``-th of ``count`` rows: one of the maps that a tensor interleaves."""
        return replace(self, rows=(first, count, step))

    @property
    def module(self) -> str:
        """The name of the module that holds the tensor."""
        return self.name.removesuffix(".weight")


def linear(module: str) -> TensorSource:
    """Return the source of a plain linear map: the module's weight, stored as [out, in]."""
    return TensorSource(f"{module}.weight", transposed=True)


@dataclass(frozen=True)
class Map:
    """Declares a linear map, or those of all experts: y = x W + bias."""

    name: str  # within its layer
    width_in: int
    width_out: int
    source: TensorSource
    split: Split = "whole"
    group: AdapterGroup | None = None  # None: no adapter
    heads: int = 0  # between which alone the outputs can be split; devices beyond them hold all. 0: anywhere
    experts: int = 0  # 0: one map for all tokens
    chosen: int = 0  # of the experts, how many a token meets
    bias: TensorSource | None = None  # [out]; with experts [experts, out]
    module: str = ""  # its name in files of adapters where the source's will not do
    kept: Any = None  # one of encoding.py, in which devices keep it (checkpoint/packed.py); None: decoded

    @property
    def outer_factor(self) -> Literal["a", "b"]:
        """The factor of an expert's map that touches the model width."""
        return "b" if self.split == "rows" else "a"

    @property
    def adapter_module(self) -> str:
        """The name of the module in files of adapters; "{layer}" and "{expert}" stand for their numbers."""
        return self.module or self.source.module

    @property
    def numbers(self) -> int:
        """How many numbers the matrix has, or those of all experts."""
        return max(1, self.experts) * self.width_in * self.width_out

    def numbers_met(self, tp: int = 1) -> float:
        """Return with how many of them one of ``tp`` devices multiplies a token."""
        return max(1, self.chosen) * self.width_in * self.width_out / parts(self, tp)


@dataclass(frozen=True)
class Parameter:
    """Declares an array of a layer that is no linear map: a norm's weight, a bias, a convolution."""

    name: str
    shape: tuple[int, ...]
    source: TensorSource
    split: int | None = None  # the dimension that tp splits
    heads: int = 0  # as in Map
    experts_first: bool = False  # whether the first dimension counts experts, which ep splits
    is_fp32: bool = False  # whether it is kept in fp32 whatever the compute dtype is


def norm_of(name: str, width: int, module: str) -> Parameter:
    """Declare the weight of a norm."""
    return Parameter(name, (width,), TensorSource(f"{module}.weight"))


def is_split(array: Map | Parameter, tp: int) -> bool:
    """Say whether tp splits an array: not where it has fewer heads than devices."""
    if array.split in (None, "whole"):
        return False
    return not (array.heads and array.heads % tp)


def parts(array: Map | Parameter, tp: int) -> int:
    """Return over how many of ``tp`` devices an array is split; 1: each has it whole."""
    return tp if is_split(array, tp) else 1


def bias_of(declared: Map) -> Parameter | None:
    """Return the bias of a map as an array of its own, named after the map."""
    if declared.bias is None:
        return None
    columns = declared.split == "columns"
    shape = (declared.width_out,)
    if declared.experts:
        shape = (declared.experts, *shape)
    return Parameter(
        f"{declared.name}_bias",
        shape,
        declared.bias,
        len(shape) - 1 if columns else None,
        declared.heads,
        bool(declared.experts),
    )
