"""Workers that take no command before its program is compiled; compilations can be held back."""

import asyncio

from spmd_tx.coordinator.mesh.warm_up_progress import CompileProgress
from spmd_tx.protocol.commands import Decode, Forward, ForwardBackward, Move, OptimStep, Prefill
from spmd_tx.protocol.programs import ProgramShape
from spmd_tx.protocol.reports import Compiled
from tests.coordinator.sampling.fake_device import FakeWorkers


def program_of(command):
    """What a worker runs for a command; None: nothing that it compiles."""
    match command:
        case Forward() | ForwardBackward():
            rows, targets = command.rows.tokens.shape, command.rows.targets.shape[2:]
            return ProgramShape(
                step="forward" if isinstance(command, Forward) else "forward_backward",
                rows=rows[0],
                row_length=rows[1],
                targets=targets[0] if targets else 0,
                sequences=command.loss.ratio_mask is not None,
            )
        case Prefill(rows=rows, tables=tables, wishes=wishes):
            scores = {}
            if wishes is not None:
                scores = {"top": wishes.top, "named": wishes.targets.shape[2], "draws": wishes.draws}
            return ProgramShape(
                step="prefill",
                rows=rows.tokens.shape[0],
                row_length=rows.tokens.shape[1],
                table=0 if tables is None else tables.shape[1],
                logprobs=command.logprobs,
                **scores,
            )
        case Decode():
            rows = len(command.source)
            return ProgramShape(step="decode", rows=rows, active=command.active, top=command.top)
        case OptimStep():
            return ProgramShape(step="optim_step")
        case Move():
            return ProgramShape(step=command.pair.step)
        case _:
            return None


class CompilingWorkers(FakeWorkers):
    def __init__(self, device, holds=lambda program: False):
        super().__init__(device)
        self.programs = CompileProgress()
        self.menu = []
        self.holds = holds
        self.errors = {}  # of programs that cannot be compiled
        self.ordered = []
        self.compiled = set()
        self.held = {}  # answers, by program

    def compile(self, program, *, lane, is_last, is_hurried):
        assert program not in self.compiled, f"{program} was ordered twice"
        self.ordered.append(program)
        loop = asyncio.get_running_loop()
        self.held[program] = loop.create_future()
        if not self.holds(program):
            loop.call_soon(self.let_go, program)
        return self.held[program]

    def let_go(self, *programs):
        """End these compilations, or all that are held back."""
        for program in programs or list(self.held):
            answer, error = self.held.pop(program), self.errors.get(program)
            if error is None:
                self.compiled.add(program)
            answer.set_result(Compiled(generation=1, process=0, number=0, seconds=1.0, error=error))

    def send(self, command, requests=()):
        program = program_of(command)
        assert program is None or program in self.compiled, f"a command waits for {program}"
        return super().send(command, requests)
