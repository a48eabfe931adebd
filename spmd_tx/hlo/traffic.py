"""How many bytes an instruction reads from and writes to the device's main memory.

Each operand counts once and each result once. What a fusion reads of an operand through slices counts as the
slices, and what it writes in place counts as the update.
"""

import json
import re

from spmd_tx.hlo.arrays import HloArray, memory_bytes_of
from spmd_tx.hlo.hints import counts_arrays, told_cost
from spmd_tx.hlo.module import Computation, HloModule, Instruction

# Instructions that neither move nor compute anything, and wholes whose parts are counted.
FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all partition-id "
    "replica-id opt-barrier add-dependency domain async get-dimension-size".split()
)
FREE_TARGETS = frozenset(
    "AllocateBuffer AssumeGatherIndicesInBound Sharding SPMDFullToShardShape SPMDShardToFullShape "
    "annotate_device_placement MoveToHost MoveToDevice".split()
)
SLICES = ("dynamic-slice", "slice", "gather")
VIEWS = ("bitcast", "reshape", "get-tuple-element")
IN_PLACE = ("dynamic-update-slice", "scatter")
ENDS = ("-update", "-done")  # of the names of instructions that go on with, or await, what another one begins
SEMAPHORES = 2  # the memory space of those with which a TPU waits for others
DEEPEST = 6  # of views and fusions inside fusions that are looked through
ESTIMATE = re.compile(r'"cost_estimate":\s*(\{[^{}]*\})')
ALIASES = re.compile(r"output_to_operand_aliasing=\{(.*?\))\s*\}")
ALIAS = re.compile(r"\{(\d*)\}:\s*\((\d+)")


def is_free(instruction: Instruction) -> bool:
    """Say whether an instruction takes no time of its own."""
    if instruction.does == "custom-call":
        return instruction.target in FREE_TARGETS
    return instruction.does in FREE or instruction.op.endswith(ENDS)


def traffic(module: HloModule, computation: Computation, instruction: Instruction) -> tuple[float, float]:
    """Return the bytes that an instruction reads and writes."""
    op = instruction.does
    operands = list(computation.operands(instruction))
    if is_free(instruction):
        return 0.0, 0.0
    if op == "fusion":
        return _of_fusion(module, computation, instruction)
    if op == "custom-call":
        return _of_custom_call(operands, instruction)
    arrays = instruction.arrays
    written = sum(array.memory_bytes for array in arrays)
    if op in SLICES:
        indices = sum(memory_bytes_of(each.type) for each in operands[1:])
        moved = sum(array.bytes for array in arrays)
        return (0.0 if _is_on_chip(operands[0]) else moved) + indices, written
    if op in IN_PLACE and len(operands) > 1:
        update = _written_in_place(op, operands)
        moved = memory_bytes_of(update.type)
        return moved, sum(array.bytes for array in update.arrays) if written else 0.0
    return sum(memory_bytes_of(each.type) for each in operands), written


def _written_in_place(op: str, operands: list[Instruction]) -> Instruction:
    return operands[1 if op == "dynamic-update-slice" else -1]


def estimate(instruction: Instruction) -> dict[str, float]:
    """Return what the author of a kernel has written down: flops, transcendentals and bytes_accessed."""
    match = ESTIMATE.search(instruction.attributes.replace('\\"', '"'))
    if not match:
        return told_cost(instruction.source)
    try:
        return {name: float(value) for name, value in json.loads(match[1]).items()}
    except (ValueError, TypeError):
        return {}


def written_elements(module: HloModule, instruction: Instruction) -> list[tuple[str, tuple[int, ...]]]:
    """Return dtype and dimensions of each array of main memory that an instruction writes as a whole.

    Updates in place are left out, and so is what only has another name.
    """
    if is_free(instruction) or instruction.does in IN_PLACE:
        return []
    arrays = instruction.arrays
    if instruction.does == "custom-call":
        aliased = {int(place or 0) for place, _ in _aliases(instruction)}
        arrays = tuple(array for place, array in enumerate(arrays) if place not in aliased)
    if instruction.does == "fusion" and (fused := module.called(instruction)) is not None:
        roots = _roots(fused)
        if len(roots) == len(arrays):
            pairs = zip(arrays, roots, strict=True)
            arrays = tuple(array for array, root in pairs if _update(module, fused, root) is None)
    return [(array.dtype, array.dims) for array in arrays if not array.space]


def _of_custom_call(operands: list[Instruction], instruction: Instruction) -> tuple[float, float]:
    estimated = estimate(instruction)
    if "bytes_accessed" in estimated:
        on_chip = _on_chip_bytes([*operands, instruction]) if counts_arrays(instruction.source) else 0.0
        return max(0.0, estimated["bytes_accessed"] - on_chip), 0.0
    aliases = _aliases(instruction)
    outputs = {int(place or 0) for place, _ in aliases}
    read = sum(memory_bytes_of(each.type) for each in operands)
    written = sum(
        array.memory_bytes for place, array in enumerate(instruction.arrays) if place not in outputs
    )
    return read, written


def _aliases(instruction: Instruction) -> list[tuple[str, str]]:
    """Return the pairs of output and operand that are the same buffer."""
    listed = ALIASES.search(instruction.attributes)
    return ALIAS.findall(listed[1]) if listed else []


def _of_fusion(module: HloModule, computation: Computation, fusion: Instruction) -> tuple[float, float]:
    fused = module.called(fusion)
    operands = list(computation.operands(fusion))
    if fused is None:
        return sum(memory_bytes_of(each.type) for each in operands), memory_bytes_of(fusion.type)
    # A collective that goes on beside others hands its buffers from one fusion to the next.
    handed_on = _aliases(fusion) if continues(computation, fusion) or begins(fusion) else []
    read = 0.0
    for place, operand in enumerate(operands):
        if any(int(source) == place for _, source in handed_on):
            continue
        whole = memory_bytes_of(operand.type)
        parameter = fused.parameters.get(place)
        part = _read_of(module, fused, parameter.name) if whole and parameter is not None else None
        read += whole if part is None else min(whole, part)
    return read, _written_by(module, fused, fusion, {int(place or 0) for place, _ in handed_on})


def begins(fusion: Instruction) -> bool:
    """Say whether a fusion begins a collective that goes on beside others, as TPUs write it."""
    return any(_is_semaphore(array) for array in fusion.arrays)


def continues(computation: Computation, fusion: Instruction) -> bool:
    """Say whether a fusion goes on with, or ends, what another one has begun."""
    return any(_is_semaphore(array) for each in computation.operands(fusion) for array in each.arrays)


def _is_semaphore(array: HloArray) -> bool:
    return array.space == SEMAPHORES and array.dtype == "u32"


def _read_of(module: HloModule, fused: Computation, name: str, depth: int = 0) -> float | None:
    """Return the bytes that a fusion reads of a value; None: all of it."""
    if depth > DEEPEST:
        return None
    total = 0.0
    for user, place in fused.uses.get(name, []):
        if user.op in SLICES and place == 0:
            part: float | None = sum(array.bytes for array in user.arrays)
        elif user.op in IN_PLACE and place == 0:
            part = 0.0
        elif user.op in VIEWS:
            part = _read_of(module, fused, user.name, depth + 1)
        elif user.op == "tuple":
            part = 0.0
        elif user.op == "fusion":
            inner = module.called(user)
            parameter = inner.parameters.get(place) if inner is not None else None
            if inner is None or parameter is None:
                return None
            part = _read_of(module, inner, parameter.name, depth + 1)
        else:
            part = None
        if part is None:
            return None
        total += part
    return total


def _written_by(module: HloModule, fused: Computation, fusion: Instruction, handed_on: set[int]) -> float:
    roots, arrays = _roots(fused), fusion.arrays
    if len(roots) != len(arrays):
        return sum(array.memory_bytes for place, array in enumerate(arrays) if place not in handed_on)
    total = 0.0
    for place, (root, array) in enumerate(zip(roots, arrays, strict=True)):
        if place in handed_on:
            continue
        update = _update(module, fused, root)
        total += array.memory_bytes if update is None else (0.0 if array.space else update)
    return total


def _roots(fused: Computation) -> list[Instruction]:
    root = fused.root
    return list(fused.operands(root)) if root.op == "tuple" else [root]


def _update(module: HloModule, fused: Computation, value: Instruction, depth: int = 0) -> float | None:
    """Return the bytes that change where a value is an operand updated in place; None: it is new."""
    if depth > DEEPEST:
        return None
    operands = list(fused.operands(value))
    if value.op in VIEWS and operands:
        return _update(module, fused, operands[0], depth + 1)
    if value.op in IN_PLACE and len(operands) > 1:
        before = operands[0]
        while before.op in VIEWS and before.operands:
            before = next(fused.operands(before))
        earlier = 0.0 if before.op == "parameter" else _update(module, fused, before, depth + 1)
        written = sum(array.bytes for array in _written_in_place(value.op, operands).arrays)
        return None if earlier is None else earlier + written
    if value.op == "fusion":
        inner = module.called(value)
        if inner is not None and inner.root.op != "tuple":
            return _update(module, inner, inner.root, depth + 1)
    return None


def _is_on_chip(value: Instruction) -> bool:
    return any(array.space for array in value.arrays)


def _on_chip_bytes(values: list[Instruction]) -> float:
    """Add up arrays outside main memory; a value that is given twice counts once."""
    arrays = [array for each in {each.name: each for each in values}.values() for array in each.arrays]
    return sum(array.bytes for array in arrays if array.space)
