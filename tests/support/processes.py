"""Questions about processes that may end at any moment, and are then no error."""

import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

SECONDS = 60


def has_ended(process: psutil.Process | int) -> bool:
    """Whether a process, or that of an id, has ended. Its parent may not have taken its exit code yet."""
    try:
        process = _process(process)
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until_ended(processes: Iterable[psutil.Process | int], seconds: float = SECONDS) -> None:
    """Wait for the end of all of them. An AssertionError names those that have not ended by then."""
    deadline = time.monotonic() + seconds
    while living := [process for process in processes if not has_ended(process)]:
        assert time.monotonic() < deadline, f"still running: {living}"
        time.sleep(0.01)


def command_line(process: psutil.Process) -> list[str]:
    """Return the words of its command; none when it has ended."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def kill(processes: Iterable[psutil.Process | int]) -> None:
    """Send SIGKILL to those that have not ended."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            _process(process).kill()


def _process(process: psutil.Process | int) -> psutil.Process:
    return psutil.Process(process) if isinstance(process, int) else process
