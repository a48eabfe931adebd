"""Estimates how long devices work on a command, from how long they worked on others like it. Pure."""

from typing import NamedTuple

from spmd_tx.coordinator.training.batching import Chunk
from spmd_tx.protocol.commands import AnyCommand, Decode, Forward, ForwardBackward, Prefill

WEIGHT_OF_LAST = 0.25  # of the last command in a running average


class CommandWork(NamedTuple):
    """Says what devices have to do for a command."""

    step: str
    sizes: tuple[int, ...]  # of its program, but for the number of rows of training and prefills
    units: int  # rows; steps of a decode
    tokens: int  # with padding; steps of a decode, which reads all weights however few its rows


def work_of(command: AnyCommand) -> CommandWork:
    step = command.name
    match command:
        case Decode(steps=steps):
            return CommandWork(step, (len(command.source), command.active, command.top), steps, steps)
        case Forward(rows=rows, loss=loss) | ForwardBackward(rows=rows, loss=loss):
            sizes = *rows.targets.shape[1:], loss.ratio_mask is not None
            return CommandWork(step, sizes, len(rows.tokens), rows.tokens.size)
        case Prefill(rows=rows, tables=tables):
            sizes = rows.tokens.shape[1], 0 if tables is None else tables.shape[1], command.logprobs
            return CommandWork(step, sizes, len(rows.tokens), rows.tokens.size)
        case _:
            return CommandWork(step, (), 1, 1)


def work_of_chunk(chunk: Chunk) -> CommandWork:
    step = "forward" if chunk.forward_only else "forward_backward"
    sizes = *chunk.rows.targets.shape[1:], chunk.loss.ratio_mask is not None
    return CommandWork(step, sizes, chunk.used, chunk.tokens)


class CommandSeconds:
    """Keeps running averages: for each program the seconds of a row or a step, for each step of a token."""

    def __init__(self) -> None:
        self._by_program: dict[tuple[str, tuple[int, ...]], float] = {}  # seconds per unit
        self._by_step: dict[str, float] = {}  # seconds per token

    def learn(self, work: CommandWork, seconds: float) -> None:
        program = work.step, work.sizes
        self._by_program[program] = _average(self._by_program.get(program), seconds / work.units)
        self._by_step[work.step] = _average(self._by_step.get(work.step), seconds / work.tokens)

    def estimate(self, work: CommandWork) -> float | None:
        """Return the seconds that a command will take; None: there was no such command yet."""
        of_unit = self._by_program.get((work.step, work.sizes))
        if of_unit is not None:
            return of_unit * work.units
        of_token = self._by_step.get(work.step)
        return None if of_token is None else of_token * work.tokens

    def of_token(self, step: str) -> float | None:
        """Return the seconds of a token of a step, or of one step of a decode; None: there was none yet."""
        return self._by_step.get(step)


def _average(known: float | None, last: float) -> float:
    return last if known is None else known + WEIGHT_OF_LAST * (last - known)
