"""Notices when the event loop is blocked: logs where, and ends a process whose loop is blocked for good.

Whatever starts the server again, such as systemd or a kubelet, then gets a server that answers, and the next
start knows from the log which requests were at work.
"""

import asyncio
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from spmd_tx.coordinator.runtime import metrics

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS = 0.25
STALL_SECONDS = 1.0  # for which the loop may be blocked without an entry in the log

# After this time the loop is taken for dead. The limits on requests keep the loop far below it, even on a
# busy machine.
DEAD_SECONDS = 60.0

# The exit code of a process whose loop is dead: the one that a shell reports for a process ended by SIGPROF.
# Supervisors that restart killed servers restart this one, and no other end of a server has this code.
EXIT_CODE = 128 + signal.SIGPROF


def end_process() -> NoReturn:
    """Exit at once, as an orderly end needs the loop. Requests are safe in the log; workers end, too."""
    faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
    os._exit(EXIT_CODE)


class LoopWatchdog:
    """Schedules a callback in the loop, and checks from another thread whether it has run."""

    def __init__(self, loop: asyncio.AbstractEventLoop, end: Callable[[], None] = end_process) -> None:
        """Must be called in the thread of the loop."""
        self._loop = loop
        self._end = end
        self._thread_of_loop = threading.get_ident()
        self._has_turned = True
        self._stood = 0.0  # seconds for which the loop has been blocked
        self._longest = 0.0

    def look(self, seconds: float) -> None:
        """Check the loop, ``seconds`` after the last look."""
        if self._has_turned:
            if self._stood > STALL_SECONDS:
                logger.error("the event loop continues; it was blocked for %.1f s", self._stood)
            self._has_turned, self._stood = False, 0.0
            self._loop.call_soon_threadsafe(self._turn)
            return
        was_stall = self._stood > STALL_SECONDS
        self._stood += seconds
        if self._stood > STALL_SECONDS:
            self._note_stall(seconds if was_stall else self._stood, is_new=not was_stall)
        if self._stood >= DEAD_SECONDS:
            logger.critical(
                "the event loop has been blocked for %.0f s; the process exits with code %d, to be restarted",
                self._stood,
                EXIT_CODE,
            )
            self._end()

    def _turn(self) -> None:
        self._has_turned = True

    def _note_stall(self, more: float, is_new: bool) -> None:
        metrics.LOOP_STALL_SECONDS.inc(more)
        self._longest = max(self._longest, self._stood)
        metrics.LONGEST_LOOP_STALL.set(self._longest)
        if is_new:
            metrics.LOOP_STALLS.inc()
            logger.error(
                "the event loop has been blocked for %.1f s, and nobody gets an answer. It is at:\n%s",
                self._stood,
                self._stack(),
            )

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._thread_of_loop)
        return "".join(traceback.format_stack(frame)).rstrip() if frame else "a thread that has ended"


def counted_seconds(wall: float, computed: float) -> float:
    """How much of the time between two looks counts, given its wall time and the CPU time of the process.

    A process that is stopped, or whose machine is paused, computes nothing, so its sleep counts as one look.
    Code that lets no other thread of Python run delays the look, but computes all the while.
    """
    return min(wall, max(SECONDS_BETWEEN_LOOKS, computed))


@contextmanager
def watching(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Watch a loop until the block ends. Must be called in the thread of the loop."""
    watchdog, stopping = LoopWatchdog(loop), threading.Event()

    def keep_looking() -> None:
        wall, computed = time.monotonic(), time.process_time()
        while not stopping.wait(SECONDS_BETWEEN_LOOKS):
            give_time_to_look()
            then = wall, computed
            wall, computed = time.monotonic(), time.process_time()
            watchdog.look(counted_seconds(wall - then[0], computed - then[1]))

    thread = threading.Thread(target=keep_looking, name="loop watchdog", daemon=True)
    with ended_if_nobody_looks():
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()


@contextmanager
def ended_if_nobody_looks() -> Iterator[None]:
    """End the process, with all stacks, when code keeps the GIL for good, so that the watchdog cannot look.

    The kernel then sends SIGPROF, since the process has used DEAD_SECONDS of CPU time without a look.
    """
    if sys.__stderr__ is not None:
        faulthandler.register(signal.SIGPROF, sys.__stderr__, all_threads=True, chain=True)
    give_time_to_look()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        faulthandler.unregister(signal.SIGPROF)


def give_time_to_look(seconds: float = DEAD_SECONDS) -> None:
    """Allow the process this much CPU time until the next call."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
