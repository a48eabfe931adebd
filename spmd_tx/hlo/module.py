"""Parses the text of an HLO module into computations and instructions."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

from spmd_tx.hlo.arrays import HloArray, arrays_of
from spmd_tx.hlo.hints import is_usually_false, told_turns

HEADER = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*)?\{\s*$")
ASSIGNMENT = re.compile(r"^\s*(ROOT\s+)?%?([\w.\-]+)\s*=\s*(.*)$")
OPCODE = re.compile(r"([\w\-]+)\(")
OPERAND = re.compile(r"%([\w.\-]+)")
OP_NAME = re.compile(r'op_name="([^"]*)"')
FRAME = re.compile(r"\bstack_frame_id=(\d+)")
TARGET = re.compile(r'custom_call_target="([^"]*)"')
PARTITIONS = re.compile(r"num_partitions=(\d+)")
COMPARED = re.compile(r"direction=(\w+)")
TRIPS = re.compile(r'known_trip_count"?\s*[:=]\s*\{\s*"?n"?\s*[:=]\s*"?(\d+)')
NUMBER = re.compile(r"^\s*(\d+)\s*$")
START = "-start"  # ends the names of instructions that begin what another one awaits


@dataclass(frozen=True)
class Instruction:
    """Holds one instruction."""

    name: str
    op: str
    type: str  # of one that begins something: of what it will have given in the end
    operands: tuple[str, ...]  # names in the same computation
    arguments: str  # what stands in the parentheses: a parameter's number, a constant's value
    attributes: str
    is_root: bool

    @property
    def arrays(self) -> tuple[HloArray, ...]:
        return arrays_of(self.type)

    @property
    def does(self) -> str:
        """The operation that it is or begins."""
        return self.op.removesuffix(START)

    @property
    def is_start(self) -> bool:
        """Whether it only begins an operation, which another instruction awaits."""
        return self.op.endswith(START)

    @property
    def source(self) -> str:
        """The operation of the traced program from which it comes; empty if XLA made it up."""
        return _first(OP_NAME, self.attributes)

    @property
    def frame(self) -> int:
        """The number of the stack in which it was made (frames.py); 0: unknown."""
        return int(_first(FRAME, self.attributes) or 0)

    @property
    def target(self) -> str:
        """What a custom call calls."""
        return _first(TARGET, self.attributes)

    def called(self, key: str) -> str:
        """Return the name of the computation that an attribute such as ``body`` names; empty: none."""
        return _first(re.compile(rf"\b{key}=%?([\w.\-]+)"), self.attributes)

    @property
    def likely_branches(self) -> list[str]:
        """The branches that a conditional may usually take: the one for false, if the program says so."""
        if is_usually_false(self.source):
            return [self.called("false_computation") or self.branches[0]]
        return self.branches

    @property
    def branches(self) -> list[str]:
        """The computations among which a conditional chooses."""
        listed = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        if listed:
            return OPERAND.findall(listed[1]) or re.findall(r"[\w.\-]+", listed[1])
        named = (self.called("true_computation"), self.called("false_computation"))
        return [name for name in named if name]


@dataclass
class Computation:
    """Holds the instructions of one computation, in the order in which they run if XLA has scheduled them."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def root(self) -> Instruction:
        return next((each for each in self.instructions if each.is_root), self.instructions[-1])

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        return {int(each.arguments): each for each in self.instructions if each.op == "parameter"}

    @cached_property
    def uses(self) -> dict[str, list[tuple[Instruction, int]]]:
        """The users of each value, and which of their operands it is."""
        users: dict[str, list[tuple[Instruction, int]]] = {}
        for user in self.instructions:
            for place, operand in enumerate(user.operands):
                users.setdefault(operand, []).append((user, place))
        return users

    def operands(self, instruction: Instruction) -> Iterator[Instruction]:
        for name in instruction.operands:
            if name in self.by_name:
                yield self.by_name[name]


@dataclass
class HloModule:
    """Holds a parsed module."""

    entry: Computation
    computations: dict[str, Computation]
    devices: int  # that run it together

    def called(self, instruction: Instruction, key: str = "calls") -> Computation | None:
        """Return the computation that an attribute of an instruction names: that which a fusion fuses."""
        return self.computations.get(instruction.called(key))

    def trips(self, loop: Instruction) -> int | None:
        """Return how often a while loop runs; None if that depends on data, and nobody tells (hints.py).

        XLA writes it down where it knows. Otherwise it is the constant with which a counter from zero is
        compared, if there is one.
        """
        counted = self._counted(loop)
        return told_turns(loop.source) if counted is None else counted

    def _counted(self, loop: Instruction) -> int | None:
        known = TRIPS.search(loop.attributes)
        if known:
            return int(known[1])
        condition = self.called(loop, "condition")
        if condition is None:
            return None
        comparison = condition.root
        if comparison.op == "fusion" and (fused := self.called(comparison)) is not None:
            comparison = fused.root
        limits = [each for each in condition.operands(condition.root) if each.op == "constant"]
        is_below = comparison.op == "compare" and _first(COMPARED, comparison.attributes) == "LT"
        if not is_below or len(limits) != 1:
            return None
        number = NUMBER.match(limits[0].arguments)
        return int(number[1]) if number else None


def parse(text: str) -> HloModule:
    """Parse a module. Raises ValueError if it has no entry."""
    computations: dict[str, Computation] = {}
    entry: Computation | None = None
    current: Computation | None = None
    devices = 1
    for line in text.splitlines():
        if line.startswith("HloModule"):
            devices = int(_first(PARTITIONS, line) or 1)
        elif current is None:
            header = HEADER.match(line)
            if header:
                current = computations[header[2]] = Computation(header[2])
                entry = current if header[1] else entry
        elif line.startswith("}"):
            current = None
        else:
            instruction = _instruction(line)
            if instruction is not None:
                current.instructions.append(instruction)
    if entry is None or not entry.instructions:
        raise ValueError("this is not the text of an HLO module: it has no entry")
    return HloModule(entry, computations, devices)


def _first(pattern: re.Pattern[str], text: str) -> str:
    """Return the group of the first place where a pattern matches; empty: there is none."""
    match = pattern.search(text)
    return match[1] if match else ""


def _instruction(line: str) -> Instruction | None:
    assigned = ASSIGNMENT.match(line)
    if assigned is None:
        return None
    end = _end_of_type(assigned[3])
    kind, rest = assigned[3][:end], assigned[3][end:].lstrip()
    opcode = OPCODE.match(rest)
    if opcode is None:
        return None
    close = _closing(rest, opcode.end() - 1)
    arguments = rest[opcode.end() : close]
    return Instruction(
        name=assigned[2],
        op=opcode[1],
        type=_result(opcode[1], kind),
        operands=tuple(OPERAND.findall(arguments)),
        arguments=arguments,
        attributes=rest[close + 1 :],
        is_root=bool(assigned[1]),
    )


def _result(op: str, kind: str) -> str:
    """Return the type of what an operation gives in the end.

    One that begins has a tuple of its operands, its result, and what it needs meanwhile. A copy has its
    result first, and a sum over devices may have nothing else.
    """
    is_result = op == "all-reduce-start" and not kind.startswith("((")
    if not op.endswith(START) or not kind.startswith("(") or is_result:
        return kind
    return _elements(kind)[0 if op == "copy-start" else 1].strip()


def _elements(kind: str) -> list[str]:
    """Return the types in a tuple."""
    parts, depth = [""], 0
    for letter in kind[1:-1]:
        depth += (letter in "{[(") - (letter in "}])")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _end_of_type(text: str) -> int:
    """Return where the type ends at the beginning of a definition: a tuple, or an array with its layout."""
    if text.startswith("("):
        return _closing(text, 0) + 1
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter in "{[(") - (letter in "}])")
        if letter == " " and depth == 0:
            return place
    return len(text)


def _closing(text: str, opening: int) -> int:
    """Return the place of the parenthesis that closes the one at ``opening``."""
    depth, place = 0, opening
    for parenthesis in re.finditer(r"[()]", text[opening:]):
        place = opening + parenthesis.start()
        depth += 1 if parenthesis[0] == "(" else -1
        if depth == 0:
            return place
    return len(text)
