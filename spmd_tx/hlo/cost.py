"""What one run of a program costs a device: its operations in order, loops as often as they run."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from spmd_tx.hlo import products, traffic
from spmd_tx.hlo.collectives import Collective, collective
from spmd_tx.hlo.module import Computation, HloModule, Instruction, parse

SORTS = ("__cub$", "cub::", "__cub_")  # beginnings of custom calls that sort
HloShape = tuple[str, tuple[int, ...]]  # dtype and dimensions
SMALLEST_SORT = 4096  # numbers; smaller sorts take no time


@dataclass(frozen=True)
class DeviceOperation:
    """Holds an instruction that a device runs as one: a kernel, a copy, or a collective."""

    name: str
    op: str
    type: str
    source: str  # the operation of the traced program; empty if XLA made it up
    times: float  # in one run of the program
    flops: float = 0.0  # each time, and so the bytes
    read_bytes: float = 0.0  # from main memory
    written_bytes: float = 0.0
    collective: Collective | None = None
    sorted_numbers: int = 0  # where it sorts
    given: tuple[HloShape, ...] = ()  # arrays that it may read
    written: tuple[HloShape, ...] = ()  # arrays of main memory that it writes as a whole
    frame: int = 0  # where the traced program made it (frames.py); 0: unknown

    @property
    def bytes(self) -> float:
        return self.read_bytes + self.written_bytes


@dataclass(frozen=True)
class Cost:
    """Holds all operations of a program."""

    operations: tuple[DeviceOperation, ...]
    unknown_loops: tuple[str, ...] = ()  # while loops that run as often as data says; they count once
    turns: int = 1  # of the outermost loop that costs most; 1 where there is none, or it is an unknown one

    @cached_property
    def flops(self) -> float:
        return sum(each.times * each.flops for each in self.operations)

    @cached_property
    def bytes(self) -> float:
        return sum(each.times * each.bytes for each in self.operations)

    @cached_property
    def launches(self) -> float:
        return sum(each.times for each in self.operations)

    @cached_property
    def collectives(self) -> list[DeviceOperation]:
        return [each for each in self.operations if each.collective is not None]

    @cached_property
    def sorts(self) -> list[DeviceOperation]:
        """The sorts of at least SMALLEST_SORT numbers."""
        return [each for each in self.operations if each.sorted_numbers >= SMALLEST_SORT]

    def divided(self, runs: int) -> "Cost":
        """Return the cost of one of so many equal parts of the program."""
        shares = (replace(each, times=each.times / runs) for each in self.operations)
        return replace(self, operations=tuple(shares))


def cost_of(text: str) -> Cost:
    """Return the cost of a program, from its optimized HLO. Raises ValueError if it is none."""
    module = parse(text)
    walk = _Walk(module)
    operations = walk.run(module.entry, 1.0)
    return Cost(tuple(operations), tuple(walk.unknown), walk.turns)


@dataclass
class _Walk:
    """Follows the calls from the entry on."""

    module: HloModule
    unknown: list[str] = field(default_factory=list)
    turns: int = 1  # of the dearest loop that is in no other
    _dearest: float = 0.0
    _depth: int = 0  # of loops

    def run(self, computation: Computation, times: float) -> list[DeviceOperation]:
        operations: list[DeviceOperation] = []
        for instruction in computation.instructions:
            operations += self._operations(computation, instruction, times)
        return operations

    def _operations(
        self, computation: Computation, instruction: Instruction, times: float
    ) -> list[DeviceOperation]:
        match instruction.does:
            case "while":
                return self._loop(instruction, times)
            case "call" | "async":
                called = self.module.called(instruction, "to_apply") or self.module.called(instruction)
                return self.run(called, times) if called is not None else []
            case "conditional":
                branches = [self.module.computations[name] for name in instruction.likely_branches]
                runs = [self.run(branch, times) for branch in branches]
                return max(runs, key=_weight, default=[])  # it is not known which branch data choose
        if traffic.is_free(instruction):
            return []
        return [self._operation(computation, instruction, times)]

    def _loop(self, loop: Instruction, times: float) -> list[DeviceOperation]:
        trips = self.module.trips(loop)
        if trips is None:
            self.unknown.append(loop.name)
        body = self.module.called(loop, "body")
        if body is None:
            return []
        self._depth += 1
        operations = self.run(body, times * (1 if trips is None else trips))
        self._depth -= 1
        if not self._depth and _weight(operations) > self._dearest:
            self._dearest, self.turns = _weight(operations), trips or 1
        return operations

    def _operation(self, computation: Computation, instruction: Instruction, times: float) -> DeviceOperation:
        read, written = traffic.traffic(self.module, computation, instruction)
        inside = list(_inside(self.module, computation, instruction))
        is_begun = traffic.continues(computation, instruction)  # so it was counted before
        # A fusion that XLA made up belongs to what gives its result, its last instruction.
        made = next((each for _, each in (inside[0], *reversed(inside)) if each.source), instruction)
        exchanged = (collective(self.module, within, each) for within, each in inside if not is_begun)
        return DeviceOperation(
            name=instruction.name,
            op=instruction.op,
            type=instruction.type,
            source=made.source,
            times=times,
            flops=products.flops(self.module, computation, instruction),
            read_bytes=read,
            written_bytes=written,
            collective=_beside(instruction, next((each for each in exchanged if each is not None), None)),
            sorted_numbers=max((_sorted_numbers(each) for _, each in inside), default=0),
            given=tuple(
                (array.dtype, array.dims)
                for operand in computation.operands(instruction)
                for array in operand.arrays
            ),
            written=tuple(traffic.written_elements(self.module, instruction)),
            frame=made.frame,
        )


def _beside(instruction: Instruction, exchange: Collective | None) -> Collective | None:
    """Return a collective as one beside which others run, if a fusion only begins it."""
    is_begun = exchange is not None and instruction.does == "fusion" and traffic.begins(instruction)
    return replace(exchange, is_asynchronous=True) if exchange is not None and is_begun else exchange


def _inside(
    module: HloModule, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Computation, Instruction]]:
    """Yield an instruction, and those of the computation that it fuses."""
    yield computation, instruction
    fused = module.called(instruction) if instruction.does == "fusion" else None
    for each in fused.instructions if fused is not None else ():
        yield from _inside(module, fused or computation, each)


def _sorted_numbers(instruction: Instruction) -> int:
    """Return how many numbers an instruction sorts."""
    is_sort = instruction.does == "sort" or (
        instruction.does == "custom-call" and instruction.target.startswith(SORTS)
    )
    return max((array.elements for array in instruction.arrays), default=0) if is_sort else 0


def _weight(operations: list[DeviceOperation]) -> float:
    return sum(each.times * (each.bytes + each.flops) for each in operations)
