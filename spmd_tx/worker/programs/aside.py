"""Has programs compiled in a child process of the lowest priority, beside the commands and their threads.

Tracing in a thread of the worker would hold Python's lock, and XLA would compile in the threads that run
steps. The child writes what it compiles into the program store, where the worker finds it.
"""

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing import Pipe
from pathlib import Path

import jax
from jax.sharding import Mesh

from spmd_tx.protocol.programs import ProgramShape
from spmd_tx.sharding.mesh import platform
from spmd_tx.worker.memory.plan import Plan
from spmd_tx.worker.programs.agreement import must_agree
from spmd_tx.worker.programs.aside_messages import Answer, Begin, encode, read_answer
from spmd_tx.worker.programs.pacer import Pacer
from spmd_tx.worker.programs.store import ProgramStore
from spmd_tx.worker.programs.surroundings import surroundings, traced_settings

logger = logging.getLogger(__name__)

MAIN = "spmd_tx.worker.programs.aside_main"
QUOTED_BYTES = 2048  # of what a child has printed
MOST_ENDS = 2  # of children that ended by themselves; after that the worker compiles in its own threads


class AsideProcess:
    """Starts and ends a process that runs aside_process.py; any thread may. Holds the pipe to it."""

    def __init__(self, begin: Begin) -> None:
        self.pipe, theirs = Pipe()
        self._lock = threading.Lock()
        self._is_paused = False
        # Not this process's own output: the agent reads that until nobody has it open any more.
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", MAIN, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=self._words,
                stderr=self._words,
                pass_fds=[theirs.fileno()],
                env=os.environ,  # JAX and XLA must find what this process has found
            )
        with suppress(OSError):  # reading from it will show that it is gone
            self.pipe.send_bytes(encode(begin))

    def pause(self) -> None:
        """Stop it until ``resume``. Both may be repeated."""
        # Only Linux ends a stopped process with its parent.
        if sys.platform == "linux" and not self._is_paused:
            self._is_paused = True
            self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self.process.send_signal(signal.SIGCONT)

    def end(self) -> str:
        """Kill it if it is alive; return how it ended."""
        self.process.kill()
        code = self.process.wait()
        words = self._last_words()
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with code {code}: {words}"

    def _last_words(self) -> str:
        with self._lock:
            if self._words.closed:
                return "see above"
            with self._words:
                self._words.seek(0)
                return self._words.read()[-QUOTED_BYTES:].decode(errors="replace").strip()


class AsideCompiler:
    """Compiles programs one after the other. The child starts with the first."""

    def __init__(self, start: Callable[[], AsideProcess]) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._child: AsideProcess | None = None
        self._ends = 0
        self._has_begun = False  # the child that there is
        self._is_closed = False
        self._pacer = Pacer()

    def at_work(self, is_at_work: bool) -> None:
        """Let the child stand back while commands run. Any thread may call this."""
        self._pacer.at_work(is_at_work)

    def compile(self, program: ProgramShape, *, is_hurried: bool = False) -> Answer | None:
        """Return what the child has done for a program; None if there is no child, or it has ended.

        It stands back for commands meanwhile, unless ``is_hurried``.
        """
        child = self._running()
        if child is None:
            return None
        self._pacer.hurry(is_hurried)
        try:
            child.pipe.send_bytes(encode(program))
            self._await_begin(child)
            return read_answer(child.pipe.recv_bytes())
        except (EOFError, OSError):
            self._lose(child)
            return None

    def rest(self) -> None:
        """End the child, which frees its memory, until another program is to be compiled."""
        with self._lock:
            child, self._child = self._child, None
            self._pacer.drop()
        if child is not None:
            child.end()
            child.pipe.close()

    def close(self) -> None:
        """End the child for good. Any thread may call this, also while ``compile`` waits."""
        with self._lock:
            self._is_closed = True
            self._pacer.drop()
            child = self._child
        if child is not None:
            child.end()

    def _running(self) -> AsideProcess | None:
        with self._lock:
            if self._is_closed or self._ends >= MOST_ENDS:
                return None
            if self._child is None:
                self._child = self._start()
                self._has_begun = False
            return self._child

    def _await_begin(self, child: AsideProcess) -> None:
        """A child that was stopped before it has asked to end with this process would never end."""
        if not self._has_begun:
            child.pipe.recv_bytes()
            with self._lock:
                self._has_begun = True
                if child is self._child:
                    self._pacer.take(child)

    def _lose(self, child: AsideProcess) -> None:
        with self._lock:
            self._child = None
            self._pacer.drop()
            self._ends += 1
        ending = child.end()
        child.pipe.close()
        if not self._is_closed:
            logger.warning("the process that compiles ahead %s", ending)


def ahead_of_need(plan: Plan, mesh: Mesh) -> tuple[ProgramStore | None, AsideCompiler | None]:
    """Return where programs are kept and what compiles them aside; None where that cannot be done.

    They are compiled aside on CPUs, by a worker that has all devices of the mesh: a child cannot stand in for
    one process of several, and the devices of accelerators are needed to choose kernels. Several processes on
    accelerators keep them, too, because they must agree on which of them they have (agreement.py).
    """
    setup = plan.sizes.setup
    is_one_on_cpus = jax.process_count() == 1 and platform(mesh) == "cpu"
    if not setup.compilation_cache or not (is_one_on_cpus or must_agree(mesh)):
        return None, None
    text = surroundings(plan, mesh)
    store = ProgramStore(Path(setup.compilation_cache), text, mesh)
    if not is_one_on_cpus:
        return store, None
    begin = Begin(setup=setup, memory=plan.memory, settings=traced_settings(), surroundings=text)
    return store, AsideCompiler(partial(AsideProcess, begin))
