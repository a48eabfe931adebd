"""The compiled programs of a worker: each is compiled once, when it is ordered, and then reused.

A step is compiled ahead of time for the shapes of its arguments, and then called as that executable. The
coordinator orders programs, and sends a command only when its programs are ready on all workers, so that the
thread that runs commands never compiles. More threads compile: one for programs that somebody waits for, one
for those of other sessions, and one for programs ahead of need, which leaves the work to a child process if
there is one (aside.py). Beside TPUs, more compile ahead of need. Programs that an earlier start has left in
the store are loaded instead.

Processes that compile the same program may have to meet (on GPUs they share autotuning results), so two of
them must never wait for each other's programs. They do not: orders arrive everywhere in the same order, and
each thread takes its own in that order, like the same thread of every other process: so the earliest order
that is not done is compiled by all of them, whatever the other threads wait for. A program that was not
ordered is compiled by the command that needs it, which is the same command in every process. And they agree
whether to compile it: a process that finds a program in its store alone compiles it like the others.
"""

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
from jax.sharding import Mesh

from spmd_tx.protocol.commands import AHEAD, ASIDE, AWAITED, COMPILE_LANES, HELPING
from spmd_tx.protocol.programs import CompileReport, ProgramShape
from spmd_tx.worker.memory.allocator import free_memory
from spmd_tx.worker.programs.agreement import Agreement
from spmd_tx.worker.programs.aside import AsideCompiler
from spmd_tx.worker.programs.call import Call
from spmd_tx.worker.programs.compile_counts import compile_counts
from spmd_tx.worker.programs.lane import Lane
from spmd_tx.worker.programs.store import ProgramStore

logger = logging.getLogger(__name__)

# Of threads that compile what is not urgent, so that commands go first. On a CPU, where all processors are
# busy, a thread that hardly runs would keep Python's lock from the thread that runs commands.
NICENESS, NICENESS_BESIDE_ACCELERATORS = 5, 19
PROCESSORS_OF_THREAD = 4  # of the host, for each thread that compiles beside TPUs
IDLE_SECONDS = 20.0  # after which the child process ends


@dataclass(frozen=True)
class CompileOrder:
    """Holds an order of the coordinator: compile the programs of one kind of command."""

    number: int
    program: ProgramShape
    calls: Callable[[], Sequence[Call]]  # with abstract state
    is_hurried: bool = False  # what compiles aside does not stand back for commands


Settled = Callable[[int, float, str | None], None]  # number, seconds, what went wrong


@dataclass
class _Program:
    """Holds a program that is being compiled, or was."""

    executable: Callable[..., Any] | None = None  # None after it is settled: compilation failed
    is_settled: threading.Event = field(default_factory=threading.Event)


def _niceness() -> int:
    return NICENESS if jax.default_backend() == "cpu" else NICENESS_BESIDE_ACCELERATORS


def compile_threads(platform: str, processors: int) -> int:
    """Return how many threads of a worker may compile what nobody waits for.

    GPUs have one: XLA tries kernels on them while it compiles, whose times others would disturb, and the
    memory plan has room for one that does so.
    """
    return max(1, min(1 + len(HELPING), processors // PROCESSORS_OF_THREAD)) if platform == "tpu" else 1


class Programs:
    """Compiles, keeps and runs all programs of this process."""

    def __init__(self, report: Callable[[str], None], on_settled: Settled = lambda *order: None) -> None:
        """``report`` gets what commands wait for, or ""; ``on_settled`` gets how orders end."""
        self._report = report
        self._on_settled = on_settled
        self._counts = compile_counts()
        self._lock = threading.Lock()
        self._programs: dict[Hashable, _Program] = {}
        self._store: ProgramStore | None = None
        self._aside: AsideCompiler | None = None
        self._agreement: Agreement | None = None
        self.kernels, self.compile_threads = "", 1  # as Ready has them
        self._unforeseen = 0
        self._is_ending = False
        self._lanes = [
            Lane("programs awaited", lambda: 0),
            Lane("programs ahead", _niceness),
            Lane("programs aside", _niceness, self._rest, IDLE_SECONDS),
            *(Lane(f"programs ahead, {number}", _niceness) for number in HELPING),
        ]
        assert len(self._lanes) == COMPILE_LANES

    def use(
        self, store: ProgramStore | None, aside: AsideCompiler | None, agreement: Agreement | None = None
    ) -> None:
        """Keep programs in the store, and have those that nobody waits for compiled aside.

        With an agreement a program is taken from the store only if all processes have it.
        """
        self._store, self._aside, self._agreement = store, aside, agreement

    def at_work(self, is_at_work: bool) -> None:
        """Let what nobody waits for stand back while commands run."""
        if self._aside is not None:
            self._aside.at_work(is_at_work)

    @property
    def compiles_aside(self) -> bool:
        return self._aside is not None

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

    def order(self, order: CompileOrder, mesh: Mesh, *, lane: int, is_last: bool = False) -> None:
        """Compile these programs after earlier orders of the same lane."""
        self._lanes[lane].put(partial(self._carry_out, order, mesh, lane, is_last))

    def stop(self) -> bool:
        """Start no more programs; return whether none is being compiled, which would abort Python's exit."""
        self._is_ending = True
        if self._aside is not None:
            self._aside.close()
        have_ended = [lane.stop() for lane in self._lanes]
        return all(have_ended)

    def state(self) -> CompileReport:
        """Return the report for the coordinator. Any thread may call this."""
        return CompileReport(counts=self._counts.all(), unforeseen=self._unforeseen)

    def _carry_out(self, order: CompileOrder, mesh: Mesh, lane: int, is_last: bool) -> None:
        if self._is_ending:
            return
        began, error, built = time.monotonic(), None, list[tuple[Call, Any]]()
        try:
            calls = order.calls()
            if lane == ASIDE and self._aside is not None:
                self._compile_aside(order, calls)
            for call in calls if not self._is_ending else ():
                self._get(call, mesh, built)
        except Exception as problem:  # whatever the compiler raises fails this order alone
            logger.warning("could not compile %s: %s", order.program, problem)
            error = f"{type(problem).__name__}: {problem}"
        if is_last:
            self._rest()
            free_memory()
        if built:
            self._lanes[AHEAD if lane == AWAITED else lane].put(partial(self._save, built))
        self._on_settled(order.number, time.monotonic() - began, error)

    def _compile_aside(self, order: CompileOrder, calls: Sequence[Call]) -> None:
        """Have the child compile what is not in the store. What it leaves out, this thread will compile.

        Nothing is claimed meanwhile: a program that somebody waits for is compiled at once.
        """
        missing = [call for call in calls if not self._take_stored(call)]
        if not missing or self._aside is None:
            return
        answer = self._aside.compile(order.program, is_hurried=order.is_hurried)
        if answer is None:
            return
        if answer.problem is not None:
            logger.warning("could not compile %s aside: %s", order.program, answer.problem)
        for made in answer.made:
            self._counts.add(made.name, "compiler", made.seconds)
        for call in missing:
            self._take_stored(call)

    def _take_stored(self, call: Call) -> bool:
        """Return whether the program is ready, after loading it if it is in the store."""
        known = self._programs.get(call.key)
        if known is not None and known.executable is not None:
            return True
        loaded = self._loaded(call)
        if loaded is None:
            return False
        with self._lock:
            program = self._programs.setdefault(call.key, _Program())
            program.executable = program.executable or loaded
        program.is_settled.set()
        return True

    def _get(self, call: Call, mesh: Mesh, built: list[tuple[Call, Any]] | None = None) -> Callable[..., Any]:
        """Return a program; ``built`` gets it if it is one that the store lacks."""
        while True:
            program, is_mine = self._claim(call.key)
            if is_mine:
                return self._compile(program, call, mesh, built)
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

    def _compile(
        self, program: _Program, call: Call, mesh: Mesh, built: list[tuple[Call, Any]] | None = None
    ) -> Callable[..., Any]:
        try:
            compiled = self._loaded(call, mesh)
            if compiled is None:
                with self._counts.of(call.name) as sources:
                    lowered = call.step.lower(*call.abstract(mesh))
                    if self._agreement is not None:
                        self._agreement.check_same(call.description(mesh), lowered.as_text())
                    compiled = lowered.compile()
                if sources == ["compiler"] and built is not None:
                    built.append((call, compiled))
            program.executable = compiled
            return compiled
        finally:
            program.is_settled.set()

    def _loaded(self, call: Call, mesh: Mesh | None = None) -> jax.stages.Compiled | None:
        """Return the program from the store. ``mesh`` is needed where processes agree."""
        began = time.monotonic()
        loaded = self._store.load(call) if self._store is not None else None
        if self._agreement is not None and mesh is not None:
            is_everywhere = self._agreement.all_have(call.description(mesh), loaded is not None)
            loaded = loaded if is_everywhere else None
        if loaded is not None:
            self._counts.add(call.name, "store", time.monotonic() - began)
        return loaded

    def _save(self, built: Sequence[tuple[Call, Any]]) -> None:
        """Write programs for the next start."""
        if self._store is None:
            return
        try:
            for call, compiled in built:
                self._store.save(call, compiled)
        except Exception as problem:  # the disk's
            logger.warning("could not store a program: %s", problem)

    def _rest(self) -> None:
        if self._aside is not None:
            self._aside.rest()

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        self._report(f"compiling {what}")
        yield
        self._report("")
