"""Receive, execute, reply, until told to shut down.

The device works while a reply travels: a command that arrives before the previous result is complete is
dispatched at once. Replies keep the order of the commands.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np

from spmd_tx.errors import DamagedWeights, UnusableWeights
from spmd_tx.protocol.commands import (
    AnyCommand,
    Compile,
    Decode,
    DimuonStep,
    EncodeImages,
    Forward,
    ForwardBackward,
    Move,
    OptimStep,
    Prefill,
    Shutdown,
)
from spmd_tx.protocol.envelope import Envelope
from spmd_tx.protocol.reports import Reply
from spmd_tx.worker.command_spans import CommandSpans
from spmd_tx.worker.engine import NOTHING, Result
from spmd_tx.worker.inbox import Inbox
from spmd_tx.worker.result_signal import ResultSignal, is_complete

logger = logging.getLogger(__name__)

DISPATCHED = ForwardBackward, Forward, OptimStep, DimuonStep, EncodeImages, Prefill, Decode, Compile


def is_dispatched(command: AnyCommand) -> bool:
    """Return whether the engine returns once the devices have the command; the others wait for disks."""
    return command.pair.is_dispatched if isinstance(command, Move) else isinstance(command, DISPATCHED)


@dataclass
class Loop:
    """Runs the commands of one worker."""

    execute: Callable[[AnyCommand], Result]
    inbox: Inbox
    is_leader: bool  # process 0 sends arrays and metrics; the others only acknowledge
    at_work: Callable[[bool], None]  # is told when commands begin to run, and when none is left
    spans: CommandSpans | None = None  # None: commands are not reported to a collector

    def run(self) -> None:
        """Return after Shutdown. Whatever else ends the loop is an exception."""
        with ResultSignal() as signal:
            self._run(signal)

    def _run(self, signal: ResultSignal) -> None:
        unsent: tuple[int, Result, UnusableWeights | None] | None = None
        while True:
            envelope = self._next_beside(signal, *unsent[:2]) if unsent else self._wait()
            if unsent and not (envelope and is_dispatched(envelope.command)):
                self._reply(*unsent)
                unsent = None
            if envelope is None:
                continue
            self.inbox.executing = envelope.sequence
            if self.spans is not None:
                self.spans.begun(envelope)
            result, refusal = self._execute(envelope.command)
            self._start_fetching(result)
            if unsent:
                self._reply(*unsent)
            unsent = envelope.sequence, result, refusal
            if isinstance(envelope.command, Shutdown):
                self._reply(*unsent)
                return

    def _execute(self, command: AnyCommand) -> tuple[Result, UnusableWeights | None]:
        """Return the result, and why the command was refused."""
        try:
            return self.execute(command), None
        except UnusableWeights as problem:
            if isinstance(problem, DamagedWeights):
                logger.error("%s", problem)
            return NOTHING, problem

    def _next_beside(self, signal: ResultSignal, sequence: int, result: Result) -> Envelope | None:
        """Return the next command; None: the result of the last one is complete before there is one."""
        envelope = self.inbox.next_if_there()
        if envelope is not None or is_complete(result):
            return envelope
        self.inbox.executing = sequence
        signal.wait_for(result)
        return self.inbox.next_unless(signal)

    def _wait(self) -> Envelope:
        self.at_work(False)
        envelope = self.inbox.next()
        self.at_work(not isinstance(envelope.command, Compile))
        return envelope

    def _start_fetching(self, result: Result) -> None:
        if self.is_leader:
            for array in jax.tree.leaves(result):
                if isinstance(array, jax.Array):
                    array.copy_to_host_async()

    def _reply(self, sequence: int, result: Result, problem: UnusableWeights | None) -> None:
        arrays, metrics = result
        refusal, is_damage = problem and str(problem), isinstance(problem, DamagedWeights)
        self.inbox.executing = sequence  # a failure on the device surfaces here
        if self.is_leader:
            fetched = {name: np.asarray(array) for name, array in arrays.items()}
            numbers = {name: float(value) for name, value in metrics.items()}
            self.inbox.report(
                Reply,
                sequence=sequence,
                arrays=fetched,
                metrics=numbers,
                refusal=refusal,
                is_damage=is_damage,
            )
        else:
            jax.block_until_ready(result)  # "done" must mean done
            self.inbox.report(Reply, sequence=sequence, refusal=refusal, is_damage=is_damage)
        self.inbox.executing = None
        if self.spans is not None:
            self.spans.ended(sequence)
