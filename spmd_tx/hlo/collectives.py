"""Collectives: which devices take part, how much each of them has to send, and whether others wait for it."""

import re
from dataclasses import dataclass

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
    """Return the groups of devices; all devices are one group where none is named."""
    iota = IOTA.search(attributes)
    if iota:
        shape, source, order = ([int(n) for n in part.split(",")] if part else [] for part in iota.groups())
        ids = np.arange(int(np.prod(source))).reshape(source)
        ids = ids.transpose(order) if order else ids
        return tuple(tuple(int(one) for one in group) for group in ids.reshape(shape[0], -1))
    listed = LISTED.search(attributes) or PAIRS.search(attributes)
    if listed:
        return tuple(
            tuple(int(one) for one in group.split(",")) for group in re.findall(r"\{([\d, ]+)\}", listed[1])
        )
    return (tuple(range(devices)),)
