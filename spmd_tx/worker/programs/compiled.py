"""The compiled programs of a worker: each is compiled once, when it is ordered, and then reused.

A step is compiled ahead of time for the shapes of its arguments, and then called as that executable. The
coordinator orders programs, and sends a command only when its programs are ready on all workers, so that the
thread that runs commands never compiles. Two more threads compile, so that a program that somebody waits for
does not queue behind programs compiled ahead of need.

Processes that compile the same program may have to meet (on GPUs they share autotuning results), so two of
them must never wait for each other's programs. They do not: orders arrive everywhere in the same order, and
each thread takes its own in that order, like the same thread of every other process. A program that was not
ordered is compiled by the command that needs it, which is the same command in every process.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_tx.protocol.commands import COMPILE_LANES
from spmd_tx.protocol.programs import CompileReport
from spmd_tx.sharding.mesh import DATA
from spmd_tx.sharding.transfer import rows_to_devices
from spmd_tx.worker.memory.allocator import free_memory
from spmd_tx.worker.programs.compile_counts import compile_counts

logger = logging.getLogger(__name__)

STACK_BYTES = 64 << 20  # XLA recurses deeply, and the stacks of threads are small by default
AWAITED = 0  # the lane of programs that somebody waits for
NICENESS = 5  # of the thread that compiles ahead, so that commands go first
STOP_SECONDS = 5.0  # for a program that is being compiled when the worker has to end


@dataclass(frozen=True)
class Call:
    """Holds a program and its arguments. ``state`` are arrays on the devices, or ShapeDtypeStructs."""

    name: str  # "forward_backward"
    shape: tuple[int, ...]  # identifies the program of this name, in messages
    step: Any  # jitted
    state: tuple[Any, ...]
    rows: tuple[Any, ...] = ()  # host arrays, to be split over the data shards
    rest: tuple[Any, ...] = ()  # host arrays that every device has whole
    variant: Hashable = None  # what else ``step`` depends on

    @property
    def key(self) -> Hashable:
        """Identifies the program: everything that may differ between two; the state never does."""
        leaves, structure = jax.tree.flatten((self.rows, self.rest))
        return self.name, self.variant, structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)

    def placed(self, mesh: Mesh) -> tuple[Any, ...]:
        """Return the arguments to run with. A process that has all devices leaves host arrays to JAX."""
        rows = self.rows if jax.process_count() == 1 else rows_to_devices(mesh, self.rows)
        return (*self.state, *rows, *self.rest)

    def abstract(self, mesh: Mesh) -> tuple[Any, ...]:
        """Return abstract arguments to compile for."""
        split = NamedSharding(mesh, P(DATA))

        def row(leaf: np.ndarray) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=split)

        return (*self.state, *jax.tree.map(row, self.rows), *self.rest)

    def __str__(self) -> str:
        return " ".join([self.name, "x".join(map(str, self.shape))]).rstrip()


@dataclass(frozen=True)
class Order:
    """Holds an order of the coordinator: compile the programs of one kind of command."""

    number: int
    what: str  # in messages
    calls: Callable[[], Sequence[Call]]  # with abstract state


Settled = Callable[[int, float, str | None], None]  # number, seconds, what went wrong


@dataclass
class _Program:
    """Holds a program that is being compiled, or was."""

    executable: Callable[..., Any] | None = None  # None after it is settled: compilation failed
    is_settled: threading.Event = field(default_factory=threading.Event)


class _Lane:
    """Compiles one thing after the other in its own thread, started with the first."""

    def __init__(self, name: str, niceness: int) -> None:
        self._niceness = niceness
        self._waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._has_begun = False

    def put(self, work: Callable[[], None]) -> None:
        self._waiting.put(work)
        if not self._has_begun:
            self._has_begun = True
            usual = threading.stack_size(STACK_BYTES)
            self._thread.start()
            threading.stack_size(usual)

    def stop(self) -> bool:
        """Start nothing more; return whether nothing is being compiled."""
        self._waiting.put(None)
        if self._has_begun:
            self._thread.join(STOP_SECONDS)
        return not self._thread.is_alive()

    def _run(self) -> None:
        if sys.platform == "linux" and self._niceness:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)
        while (work := self._waiting.get()) is not None:
            work()


class Programs:
    """Compiles, keeps and runs all programs of this process."""

    def __init__(self, report: Callable[[str], None], on_settled: Settled = lambda *order: None) -> None:
        """``report`` gets what commands wait for, or ""; ``on_settled`` gets how orders end."""
        self._report = report
        self._on_settled = on_settled
        self._counts = compile_counts()
        self._lock = threading.Lock()
        self._programs: dict[Hashable, _Program] = {}
        self._unforeseen = 0
        self._is_ending = False
        self._lanes = [
            _Lane(f"programs {lane}", 0 if lane == AWAITED else NICENESS) for lane in range(COMPILE_LANES)
        ]

    def run(self, call: Call, mesh: Mesh) -> Any:
        """Run a program, after compiling it if it is new."""
        arguments = call.placed(mesh)
        program = self._programs.get(call.key)
        executable = program.executable if program is not None else None
        if executable is None:
            logger.warning("commands wait for %s, which nobody has ordered", call)
            self._unforeseen += 1
            with self._waiting(str(call)):
                executable = self._get(call, mesh)
        return executable(*arguments)

    def order(self, order: Order, mesh: Mesh, *, lane: int, is_last: bool = False) -> None:
        """Compile these programs after earlier orders of the same lane."""
        self._lanes[lane].put(partial(self._carry_out, order, mesh, is_last))

    def stop(self) -> bool:
        """Start no more programs; return whether none is being compiled, which would abort Python's exit."""
        self._is_ending = True
        have_ended = [lane.stop() for lane in self._lanes]
        return all(have_ended)

    def state(self) -> CompileReport:
        """Return the report for the coordinator. Any thread may call this."""
        return CompileReport(counts=self._counts.all(), unforeseen=self._unforeseen)

    def _carry_out(self, order: Order, mesh: Mesh, is_last: bool) -> None:
        if self._is_ending:
            return
        began, error = time.monotonic(), None
        try:
            for call in order.calls():
                self._get(call, mesh)
        except Exception as problem:  # whatever the compiler raises fails this order alone
            logger.warning("could not compile %s: %s", order.what, problem)
            error = f"{type(problem).__name__}: {problem}"
        if is_last:
            free_memory()
        self._on_settled(order.number, time.monotonic() - began, error)

    def _get(self, call: Call, mesh: Mesh) -> Callable[..., Any]:
        while True:
            program, is_mine = self._claim(call.key)
            if is_mine:
                return self._compile(program, call, mesh)
            program.is_settled.wait()
            if program.executable is not None:
                return program.executable

    def _claim(self, key: Hashable) -> tuple[_Program, bool]:
        """Return the program, and whether the caller has to compile it."""
        with self._lock:
            program = self._programs.get(key)
            if program is not None and (program.executable is not None or not program.is_settled.is_set()):
                return program, False
            self._programs[key] = program = _Program()
            return program, True

    def _compile(self, program: _Program, call: Call, mesh: Mesh) -> Callable[..., Any]:
        try:
            with self._counts.of(call.name):
                program.executable = compiled = call.step.lower(*call.abstract(mesh)).compile()
            return compiled
        finally:
            program.is_settled.set()

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        self._report(f"compiling {what}")
        yield
        self._report("")
