"""Receive, execute, reply, until told to shut down.

The device works while a reply travels: if the next command has arrived, it is dispatched before the
previous result is fetched. Replies keep the order of the commands.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import jax
import numpy as np

from spmd_tx.protocol.commands import (
    Compile,
    Decode,
    Forward,
    ForwardBackward,
    OptimStep,
    PageIn,
    PageOut,
    Prefill,
    SaveSampler,
    Shutdown,
    SwapIn,
    SwapOut,
    WriteSampler,
)
from spmd_tx.protocol.envelope import Envelope
from spmd_tx.protocol.reports import Reply, Report
from spmd_tx.worker.command_spans import CommandSpans
from spmd_tx.worker.execute import Result, Steps, execute

# The engine returns from these once they are dispatched to the device; the others wait for disks.
DISPATCHED = (
    ForwardBackward,
    Forward,
    OptimStep,
    SwapOut,
    SwapIn,
    SaveSampler,
    WriteSampler,
    PageOut,
    PageIn,
    Prefill,
    Decode,
    Compile,
)


@runtime_checkable
class Commands(Protocol):
    """Defines what the loop needs of the inbox."""

    executing: int | None

    def next(self) -> Envelope: ...
    def next_if_there(self) -> Envelope | None: ...
    def report(self, kind: type[Report], **fields: object) -> None: ...


@dataclass
class Loop:
    """Runs the commands of one worker."""

    steps: Steps
    inbox: Commands
    is_leader: bool  # process 0 sends arrays and metrics; the others only acknowledge
    at_work: Callable[[bool], None]  # is told when commands begin to run, and when none is left
    spans: CommandSpans | None = None  # None: commands are not reported to a collector

    def run(self) -> None:
        """Return after Shutdown. Whatever else ends the loop is an exception."""
        unsent: tuple[int, Result] | None = None
        while True:
            envelope = self.inbox.next_if_there() if unsent else self._wait()
            if unsent and not (envelope and isinstance(envelope.command, DISPATCHED)):
                self._reply(*unsent)
                unsent = None
            if envelope is None:
                continue
            self.inbox.executing = envelope.sequence
            if self.spans is not None:
                self.spans.begun(envelope)
            result = execute(self.steps, envelope.command)
            self._start_fetching(result)
            if unsent:
                self._reply(*unsent)
            unsent = envelope.sequence, result
            if isinstance(envelope.command, Shutdown):
                self._reply(*unsent)
                return

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

    def _reply(self, sequence: int, result: Result) -> None:
        arrays, metrics = result
        self.inbox.executing = sequence  # a failure on the device surfaces here
        if self.is_leader:
            fetched = {name: np.asarray(array) for name, array in arrays.items()}
            numbers = {name: float(value) for name, value in metrics.items()}
            self.inbox.report(Reply, sequence=sequence, arrays=fetched, metrics=numbers)
        else:
            jax.block_until_ready(result)  # "done" must mean done
            self.inbox.report(Reply, sequence=sequence)
        self.inbox.executing = None
        if self.spans is not None:
            self.spans.ended(sequence)
