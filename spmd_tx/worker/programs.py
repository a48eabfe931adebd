"""The compiled programs of a worker: each is compiled once, ahead of need in one thread or when it is wanted.

A step is compiled ahead of time for the shapes of its arguments, and called as that executable ever after.
One thread goes through the menu that the coordinator sends. The thread that runs commands waits for a program
if that one is at it, and else compiles it itself, at once: it never waits for programs of others.

Processes that compile the same program may have to meet (on GPUs they share what autotuning finds). So no two
of them may each wait for a program that the other has not begun, and they do not: all run the same commands
in the same order, and go through the same menu in the same order. What a command needs in one process is
compiled by that very command in any other, if it is not there or on its way already; and whatever stands at
the earliest unfinished place of the menu waits for nothing behind it. With one thread for both it would be
otherwise: what one process prefers would stand behind what the other one is at.
"""

import logging
import os
import sys
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_tx.programs_protocol import CompileReport
from spmd_tx.sharding.mesh import DATA
from spmd_tx.sharding.transfer import rows_to_devices
from spmd_tx.worker.compile_counts import compile_counts
from spmd_tx.worker.free_memory import free_memory

logger = logging.getLogger(__name__)

STACK_BYTES = 64 << 20  # XLA recurses deeply, and the stacks of threads are small by default
NICENESS = 5  # of the thread that compiles ahead: commands go before
STOP_SECONDS = 5.0  # for the program that is being compiled when the worker is told to end


@dataclass(frozen=True)
class Call:
    """A program and its arguments. ``state`` are arrays on the devices, or their ShapeDtypeStructs."""

    name: str  # "forward_backward"
    shape: tuple[int, ...]  # which of the programs of this name, for people
    step: Any  # jitted
    state: tuple[Any, ...]
    rows: tuple[Any, ...] = ()  # host arrays, to be split over the data shards
    rest: tuple[Any, ...] = ()  # host arrays that every device has whole
    variant: Hashable = None  # what else ``step`` depends on

    @property
    def key(self) -> Hashable:
        """Whatever may differ between two programs; the state never does."""
        leaves, structure = jax.tree.flatten((self.rows, self.rest))
        return self.name, self.variant, structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)

    def placed(self, mesh: Mesh) -> tuple[Any, ...]:
        """The arguments, as they are run with. A process that has all devices leaves host arrays to JAX."""
        rows = self.rows if jax.process_count() == 1 else rows_to_devices(mesh, self.rows)
        return (*self.state, *rows, *self.rest)

    def abstract(self, mesh: Mesh) -> tuple[Any, ...]:
        """The arguments, as they are compiled for."""
        split = NamedSharding(mesh, P(DATA))

        def row(leaf: np.ndarray) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=split)

        return (*self.state, *jax.tree.map(row, self.rows), *self.rest)

    def __str__(self) -> str:
        return " ".join([self.name, "x".join(map(str, self.shape))]).rstrip()


@dataclass
class _Program:
    """A program that somebody compiles or has compiled."""

    executable: Callable[..., Any] | None = None  # still None once it is settled: it could not be compiled
    is_settled: threading.Event = field(default_factory=threading.Event)


class Programs:
    """All programs of this process."""

    def __init__(self, report: Callable[[str], None], on_change: Callable[[], None] = lambda: None) -> None:
        """``report`` says what commands wait for, "" when they go on; ``on_change``: ``state`` is another."""
        self._report = report
        self._on_change = on_change
        self._counts = compile_counts()
        self._lock = threading.Lock()
        self._programs: dict[Hashable, _Program] = {}
        self._seen: set[Hashable] = set()  # of steps that are not programs of ours
        self._is_free = threading.Event()  # no command waits for a compilation
        self._is_free.set()
        self._is_ending = False
        self._thread: threading.Thread | None = None
        self._ahead = ""  # what is being compiled ahead
        self._ready, self._planned = 0, 0

    def run(self, call: Call, mesh: Mesh) -> Any:
        """Run a program, which is compiled first if it is not there yet."""
        arguments = call.placed(mesh)
        program = self._programs.get(call.key)
        executable = program.executable if program is not None else None
        if executable is None:
            with self._waiting(str(call)):
                executable = self._get(call, mesh)
        return executable(*arguments)

    def first(self, *key: Hashable) -> AbstractContextManager[None]:
        """Wrap a step that compiles what it needs itself; the first with this key is reported."""
        return nullcontext() if key in self._seen else self._compiling(key)

    def compile_ahead(self, menu: Sequence[Callable[[], Sequence[Call]]], mesh: Mesh) -> None:
        """Begin to compile programs, in this order; each entry brings calls with abstract state."""
        assert self._thread is None, "one menu, one thread"
        self._planned = len(menu)
        self._thread = threading.Thread(
            target=self._work_through, args=(menu, mesh), name="programs", daemon=True
        )
        usual = threading.stack_size(STACK_BYTES)
        self._thread.start()
        threading.stack_size(usual)

    def stop(self) -> bool:
        """Begin no more programs; whether none is being compiled. If one is, Python cannot end in order."""
        self._is_ending = True
        self._is_free.set()
        if self._thread is None:
            return True
        self._thread.join(STOP_SECONDS)
        return not self._thread.is_alive()

    def state(self) -> CompileReport:
        """For the coordinator. Any thread may ask."""
        return CompileReport(
            ahead=self._ahead, ready=self._ready, planned=self._planned, counts=self._counts.all()
        )

    def _work_through(self, menu: Sequence[Callable[[], Sequence[Call]]], mesh: Mesh) -> None:
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        for calls in menu:
            for call in calls():
                self._is_free.wait()
                if self._is_ending:
                    return
                self._one_ahead(call, mesh)
            self._ready += 1
        free_memory()
        self._ahead = ""
        self._on_change()

    def _one_ahead(self, call: Call, mesh: Mesh) -> None:
        program, is_mine = self._claim(call.key)
        if not is_mine:
            return
        self._ahead = str(call)
        self._on_change()
        try:
            self._compile(program, call, mesh)
        except (RuntimeError, ValueError, TypeError, OSError) as problem:
            # Whoever wants it will try again, and that is when it matters.
            logger.warning("could not compile %s ahead: %s", call, problem)

    def _get(self, call: Call, mesh: Mesh) -> Callable[..., Any]:
        while True:
            program, is_mine = self._claim(call.key)
            if is_mine:
                return self._compile(program, call, mesh)
            program.is_settled.wait()
            if program.executable is not None:
                return program.executable

    def _claim(self, key: Hashable) -> tuple[_Program, bool]:
        """The program, and whether the caller has to compile it."""
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
        """The menu stands still while a command waits."""
        self._is_free.clear()
        progress = f", {self._ready} of {self._planned} programs are ready" if self._planned else ""
        self._report(f"compiling {what}{progress}")
        try:
            yield
        finally:
            self._is_free.set()
            self._on_change()
        self._report("")

    @contextmanager
    def _compiling(self, key: tuple[Hashable, ...]) -> Iterator[None]:
        with self._counts.of(str(key[0])), self._waiting(" ".join(map(_text, key))):
            yield
        self._seen.add(key)


def _text(part: Hashable) -> str:
    return "x".join(map(str, part)) if isinstance(part, tuple) else str(part)
