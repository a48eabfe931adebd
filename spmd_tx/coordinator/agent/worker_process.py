"""Runs one worker process at a time, relays what it prints, notices when it ends, and ends it."""

import asyncio
import signal
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spmd_tx.coordinator.runtime.logs import pass_on
from spmd_tx.processes.parent import tied

KEPT_LINES = 200  # of a worker's output
QUOTED_LINES = 8
STACK_FRAME = "    @ "  # begins a line of an aborting C++ library's stack; the reason stands before the stack
LONGEST_LINE = 1 << 16  # bytes; a longer line is cut into several
TERMINATE_SECONDS = 1.0  # between SIGTERM and SIGKILL; a worker that hangs in a collective needs the latter


@dataclass(frozen=True)
class WorkerExit:
    """Says how a worker process ended."""

    worker: int
    code: int  # negative: the signal that killed it
    last_lines: tuple[str, ...] = ()
    is_out_of_memory: bool = False  # killed by the kernel, by its counters

    def __str__(self) -> str:
        if self.code < 0:
            end = f"was killed by signal {-self.code} ({signal.Signals(-self.code).name})"
        else:
            end = f"exited with code {self.code}"
        return f"worker {self.worker} {end}"


@dataclass
class _Process:
    process: asyncio.subprocess.Process
    ended: asyncio.Future[WorkerExit]
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))


class WorkerProcess:
    """Starts and ends the worker process of one number, on this host."""

    def __init__(self, worker: int) -> None:
        self._worker = worker
        self._started: _Process | None = None
        self._watch: asyncio.Task[None] | None = None

    async def start(
        self, command: Sequence[str], environment: Mapping[str, str]
    ) -> asyncio.Future[WorkerExit]:
        """Start the process; the future says how it ended. An earlier one must have ended."""
        assert not self.is_running
        process = await asyncio.create_subprocess_exec(
            *tied(command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # Ctrl-C in the terminal is meant for this process
        )
        self._started = _Process(process, asyncio.get_running_loop().create_future())
        self._watch = asyncio.create_task(_watch(self._worker, self._started))
        return self._started.ended

    @property
    def is_running(self) -> bool:
        return self._started is not None and not self._started.ended.done()

    @property
    def pid(self) -> int | None:
        return self._started.process.pid if self._started is not None else None

    async def stop(self, patience: float) -> None:
        """Wait for the process to end by itself; terminate it after ``patience`` seconds."""
        if self._started is None:
            return
        process = self._started.process
        for end, seconds in ((process.terminate, patience), (process.kill, TERMINATE_SECONDS)):
            await asyncio.wait([self._started.ended], timeout=seconds)
            if process.returncode is None:  # the output of an ended process may still have to be read
                end()
        await asyncio.wait([self._started.ended])

    def kill(self) -> None:
        """Kill the process."""
        if self._started is not None and self._started.process.returncode is None:
            self._started.process.kill()


async def _watch(worker: int, started: _Process) -> None:
    relay = asyncio.create_task(_relay(worker, started))
    code = await started.process.wait()
    await asyncio.wait([relay], timeout=1.0)  # a child of the worker may keep its output open
    relay.cancel()
    if not started.ended.done():
        lines = [line for line in started.lines if line and not line.startswith(STACK_FRAME)]
        started.ended.set_result(WorkerExit(worker, code, tuple(lines)[-QUOTED_LINES:]))


async def _relay(worker: int, started: _Process) -> None:
    """Log a worker's lines, and keep the last ones."""
    stream, rest = started.process.stdout, b""
    assert stream is not None
    while chunk := await stream.read(LONGEST_LINE):
        *lines, rest = (rest + chunk).split(b"\n")
        if len(rest) > LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        for line in lines:
            text = line.decode(errors="replace").rstrip()
            started.lines.append(text)
            pass_on(worker, text)
