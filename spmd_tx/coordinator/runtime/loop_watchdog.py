"""Notices when the event loop stands still: writes down where, and ends a process whose loop stands for good.

Whoever starts the server again, systemd or a kubelet, then finds a server that answers, and the next start
knows from the log which requests were at work.
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
from dataclasses import dataclass
from typing import NoReturn

from spmd_tx.coordinator.runtime import metrics

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS = 0.25
STALL_SECONDS = 1.0  # for which the loop may stand without a word

# After which it is taken for dead. What requests may cost the loop is bounded far below that, also on a busy
# machine.
DEAD_SECONDS = 60.0

# Of a process whose loop is dead: what a shell says of one that SIGPROF has ended. What starts killed servers
# again starts this one, and no other end of a server has it.
EXIT_CODE = 128 + signal.SIGPROF


@dataclass
class Stand:
    """How long the loop has stood. Has no clock: only what it is told has passed counts."""

    seconds: float = 0.0

    @property
    def is_stall(self) -> bool:
        return self.seconds > STALL_SECONDS

    @property
    def is_dead(self) -> bool:
        return self.seconds >= DEAD_SECONDS


def end_process() -> NoReturn:
    """Without the loop there is no orderly end; the log is made for that. Workers end with this process."""
    faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
    os._exit(EXIT_CODE)


class LoopWatchdog:
    """Asks the loop for a sign of life, and looks in another thread whether it has come."""

    def __init__(self, loop: asyncio.AbstractEventLoop, end: Callable[[], None] = end_process) -> None:
        """Made in the thread of the loop."""
        self._loop = loop
        self._end = end
        self._thread_of_loop = threading.get_ident()
        self._has_turned = True
        self._stand = Stand()
        self._longest = 0.0  # seconds

    def look(self, seconds: float) -> None:
        """So many seconds have passed since the last look."""
        if self._has_turned:
            self._note_end()
            self._has_turned, self._stand = False, Stand()
            self._loop.call_soon_threadsafe(self._turn)
            return
        was_stall = self._stand.is_stall
        self._stand.seconds += seconds
        if self._stand.is_stall:
            self._note_stall(seconds if was_stall else self._stand.seconds, is_new=not was_stall)
        if self._stand.is_dead:
            logger.critical(
                "the event loop has stood for %.0f s and is taken for dead; the process ends with code %d, "
                "to be started again",
                self._stand.seconds,
                EXIT_CODE,
            )
            self._end()

    def _turn(self) -> None:
        self._has_turned = True

    def _note_stall(self, more: float, is_new: bool) -> None:
        metrics.LOOP_STALL_SECONDS.inc(more)
        self._longest = max(self._longest, self._stand.seconds)
        metrics.LONGEST_LOOP_STALL.set(self._longest)
        if is_new:
            metrics.LOOP_STALLS.inc()
            logger.error(
                "the event loop has stood for %.1f s, and nobody is answered meanwhile. It is at:\n%s",
                self._stand.seconds,
                self._where(),
            )

    def _note_end(self) -> None:
        if self._stand.is_stall:
            logger.error("the event loop goes on; it stood for %.1f s", self._stand.seconds)

    def _where(self) -> str:
        frame = sys._current_frames().get(self._thread_of_loop)
        return "".join(traceback.format_stack(frame)).rstrip() if frame else "a thread that has ended"


def passed(wall: float, computed: float) -> float:
    """What counts of the time between two looks, by the clock on the wall and the CPU time of the process.

    A process that is stopped, or in a machine that is paused, computes nothing: its sleep is one look long.
    Code that lets no other thread of Python run makes a look late, but computes all the while.
    """
    return min(wall, max(SECONDS_BETWEEN_LOOKS, computed))


@contextmanager
def watching(loop: asyncio.AbstractEventLoop) -> Iterator[None]:
    """Watch a loop, in whose thread this is called, until the block ends."""
    watchdog, stopping = LoopWatchdog(loop), threading.Event()

    def look_again_and_again() -> None:
        wall, computed = time.monotonic(), time.process_time()
        while not stopping.wait(SECONDS_BETWEEN_LOOKS):
            give_time_to_look()
            then = wall, computed
            wall, computed = time.monotonic(), time.process_time()
            watchdog.look(passed(wall - then[0], computed - then[1]))

    thread = threading.Thread(target=look_again_and_again, name="loop watchdog", daemon=True)
    with ended_if_nobody_looks():
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()


@contextmanager
def ended_if_nobody_looks() -> Iterator[None]:
    """End the process, with all stacks, when code keeps Python's lock for good, and the watchdog with it.

    That is up to a signal of the kernel's: SIGPROF, after so much CPU time without a look.
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
    """Until the next call of this, the process may compute for so long."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
