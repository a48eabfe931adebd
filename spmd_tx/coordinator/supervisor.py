"""Starts the worker processes of this host, relays what they print, notices when one ends, and ends them."""

import asyncio
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

KEPT_LINES = 200  # of each worker's output
QUOTED_LINES = 8
LONGEST_LINE = 1 << 16  # bytes; more is cut into several
TERMINATE_SECONDS = 5.0  # between SIGTERM and SIGKILL

# Runs first in the new process: the kernel kills it when this process is gone, however that happened.
DIE_WITH_PARENT = """\
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
parent, *command = sys.argv[1:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() == int(parent):
    os.execv(command[0], command)
"""

WorkerCommand = Callable[[int], Sequence[str]]


@dataclass(frozen=True)
class WorkerExit:
    """How a worker process ended."""

    worker: int
    code: int  # negative: the signal that killed it
    last_lines: tuple[str, ...] = ()

    def __str__(self) -> str:
        if self.code < 0:
            how = f"was killed by signal {-self.code} ({signal.Signals(-self.code).name})"
        else:
            how = f"exited with code {self.code}"
        return f"worker {self.worker} {how}"


@dataclass
class _Process:
    process: asyncio.subprocess.Process
    watch: asyncio.Task[None] | None = None
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))


class Supervisor:
    """The worker processes of one generation on this host."""

    def __init__(self, command: WorkerCommand, count: int) -> None:
        self._command = command
        self._count = count
        self._processes: list[_Process] = []
        self._first_exit: asyncio.Future[WorkerExit] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        for worker in range(self._count):
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-I", "-S", "-c", DIE_WITH_PARENT),
                str(os.getpid()),
                *self._command(worker),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal is meant for this process
            )
            started = _Process(process)
            started.watch = asyncio.create_task(self._watch(worker, started))
            self._processes.append(started)

    @property
    def pids(self) -> list[int]:
        return [each.process.pid for each in self._processes]

    async def first_exit(self) -> WorkerExit:
        """Wait until a worker ends, and say how."""
        return await asyncio.shield(self._first_exit)

    async def stop(self, patience: float) -> None:
        """Wait for all workers to end by themselves; after ``patience`` seconds end them."""
        await self._wait(patience)
        for each in self._alive():
            each.process.terminate()
        await self._wait(TERMINATE_SECONDS)
        self.kill()
        await self._wait(None)

    def kill(self) -> None:
        """End all workers at once."""
        for each in self._alive():
            each.process.kill()

    def _alive(self) -> list[_Process]:
        return [each for each in self._processes if each.process.returncode is None]

    async def _wait(self, timeout: float | None) -> None:
        watches = [each.watch for each in self._processes if each.watch is not None]
        if watches:
            await asyncio.wait(watches, timeout=timeout)

    async def _watch(self, worker: int, started: _Process) -> None:
        relay = asyncio.create_task(_relay(worker, started))
        code = await started.process.wait()
        await asyncio.wait([relay], timeout=1.0)  # its output may be held open by a child of its own
        relay.cancel()
        if not self._first_exit.done():
            self._first_exit.set_result(WorkerExit(worker, code, tuple(started.lines)[-QUOTED_LINES:]))


async def _relay(worker: int, started: _Process) -> None:
    """Print a worker's lines on our standard error, and remember the last ones."""
    stream, rest = started.process.stdout, b""
    assert stream is not None
    while chunk := await stream.read(LONGEST_LINE):
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        for line in lines:
            text = line.decode(errors="replace").rstrip()
            started.lines.append(text)
            print(f"worker {worker}: {text}", file=sys.stderr, flush=True)
