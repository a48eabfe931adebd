"""Collectives: which devices take part, how much each of them has to send, and whether others wait for it."""

import math
import re
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from spmd_tx.hlo.module import Computation, HloModule, Instruction

NAMES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
LISTED = re.compile(r"replica_groups=\{(\{[\d,{} ]*\})\}")
IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
ALONG = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}")
AXIS = re.compile(r"([^:]+)(?::\((\d+)\)(\d+))?")
PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{} ]*\})\}")
SYNCHRONOUS = re.compile(r'"is_sync":\s*true')

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Collective:
    """Holds one collective as a device sees it."""

    name: str  # one of NAMES
    dtype: str
    bytes: float  # the larger of what it takes and what it gives
    groups: Groups  # devices that exchange with each other, by their place in the mesh
    is_asynchronous: bool  # whether other instructions may run meanwhile

    @property
    def size(self) -> int:
        """The number of devices that exchange with each other."""
        return max((len(group) for group in self.groups), default=1)

    @property
    def sent_bytes(self) -> float:
        """The bytes that a device sends in a ring."""
        others = (self.size - 1) / self.size if self.size > 1 else 0.0
        match self.name:
            case "all-reduce":
                return 2 * others * self.bytes
            case "collective-permute" | "collective-broadcast":
                return self.bytes if self.size > 1 else 0.0
            case _:
                return others * self.bytes


def collective(module: HloModule, computation: Computation, instruction: Instruction) -> Collective | None:
    """Return the collective that an instruction is, or begins; None if it is something else."""
    name = instruction.does
    if name not in NAMES:
        return None
    given = sum(array.bytes for each in computation.operands(instruction) for array in each.arrays)
    arrays = instruction.arrays
    taken = sum(array.bytes for array in arrays)
    return Collective(
        name=name,
        dtype=arrays[0].dtype if arrays else "",
        bytes=max(given, taken),
        groups=groups_of(instruction.attributes, module.devices),
        is_asynchronous=instruction.is_start and not SYNCHRONOUS.search(instruction.attributes),
    )


def groups_of(attributes: str, devices: int) -> Groups:
    """Return the groups of devices; all devices are one group where none is named.

    XLA lists the members, or writes a shape with its transposition, or (in JAX 0.12) names axes of a mesh.
    """
    iota = IOTA.search(attributes)
    if iota:
        shape, source, order = (_numbers(part) for part in iota.groups())
        return _rows(_arranged(source, order).reshape(shape))
    along = ALONG.search(attributes)
    if along:
        return _along(*along.groups())
    listed = LISTED.search(attributes) or PAIRS.search(attributes)
    if listed:
        return tuple(tuple(_numbers(group)) for group in re.findall(r"\{([\d, ]+)\}", listed[1]))
    return (tuple(range(devices)),)


def _along(mesh: str, ids: str | None, axes: str) -> Groups:
    """Return groups along axes of a mesh, ``'a'=2,'b'=8``; ``'b':(2)2`` is the middle of b as 2 x 2 x 2."""
    lengths = {name: int(length) for name, length in (axis.rsplit("=", 1) for axis in mesh.split(","))}
    # Name, and the products of the lengths before it in its axis and up to its end.
    parts: list[tuple[str, int, int]] = []
    for axis in filter(None, axes.split(",")):
        match = AXIS.fullmatch(axis)
        if match is None or match[1] not in lengths:
            raise ValueError(f"{axis!r} is no axis of the mesh {mesh}")
        before = int(match[2] or 1)
        parts.append((match[1], before, before * int(match[3] or lengths[match[1]])))
    shape: list[int] = []
    places: dict[tuple[str, int], int] = {}
    for name, length in lengths.items():
        cuts = {1, length, *(cut for part, *ends in parts if part == name for cut in ends)}
        for before, behind in pairwise(sorted(cuts)):
            places[name, before] = len(shape)
            shape.append(behind // before)
    grouped = [places[name, before] for name, before, behind in parts if behind > before]
    others = [place for place in range(len(shape)) if place not in grouped]
    if ids is None:
        placed = np.arange(math.prod(shape))
    elif order := re.fullmatch(r"(?:\[[\d,]+\]<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?", ids):
        placed = _arranged(*(_numbers(part) for part in order.groups()))
    else:
        placed = np.array(_numbers(ids.strip("[]")))
    members = placed.reshape(shape).transpose(*others, *grouped)
    return _rows(members.reshape(-1, math.prod(shape[place] for place in grouped)))


def _arranged(source: list[int], order: list[int]) -> np.ndarray:
    ids = np.arange(math.prod(source)).reshape(source)
    return ids.transpose(order) if order else ids


def _rows(groups: np.ndarray) -> Groups:
    return tuple(tuple(int(one) for one in group) for group in groups.reshape(len(groups), -1))


def _numbers(written: str | None) -> list[int]:
    return [int(number) for number in written.split(",")] if written else []
