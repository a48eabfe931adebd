"""Stops the process that compiles ahead while commands run, but for a share of the time.

The lowest priority alone is not enough: on a processor that no command wants, the process still takes memory
bandwidth, cache and the other half of a core. Steps beside it took a quarter longer
(docs/engineering_notes/compilation.md). Where steps take longer still because a program of their own is
missing, it does not stand back.
"""

import threading
import time
from typing import Protocol, runtime_checkable

TICK_SECONDS = 0.025
QUIET_SECONDS = 0.05  # without a command, until the process goes on
SHARE = 4  # it has one of so many ticks while commands run, so that it gets ahead on a busy server, too


@runtime_checkable
class Pausable(Protocol):
    """Defines a process that can be stopped and continued by any thread; both may be repeated."""

    def pause(self) -> None: ...
    def resume(self) -> None: ...


class Pacer:
    """Decides when a process may run."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: Pausable | None = None
        self._is_at_work = False
        self._quiet_since = 0.0  # time.monotonic()
        self._is_its_turn = False
        self._is_hurried = False

    def at_work(self, is_at_work: bool) -> None:
        """Note that commands run from now on, or no more."""
        with self._lock:
            self._is_at_work, self._quiet_since = is_at_work, time.monotonic()
            if is_at_work and not self._is_its_turn and self._process is not None:
                self._process.pause()

    def hurry(self, is_hurried: bool) -> None:
        """Let the process run beside commands from now on, at its priority, or no more."""
        with self._lock:
            self._is_hurried = is_hurried

    def take(self, process: Pausable) -> None:
        """Pace this process until ``drop``."""
        with self._lock:
            self._process = process
        threading.Thread(target=self._run, args=(process,), name="pacer", daemon=True).start()

    def drop(self) -> None:
        """Leave the process alone."""
        with self._lock:
            self._process = None

    def _run(self, process: Pausable) -> None:
        tick = 0
        while True:
            time.sleep(TICK_SECONDS)
            tick += 1
            with self._lock:
                if self._process is not process:
                    return
                self._is_its_turn = self._is_hurried or tick % SHARE == 0 or self._is_quiet()
                if self._is_its_turn:
                    process.resume()
                else:
                    process.pause()

    def _is_quiet(self) -> bool:
        return not self._is_at_work and time.monotonic() - self._quiet_since >= QUIET_SECONDS
