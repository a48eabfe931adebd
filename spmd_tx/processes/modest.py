"""Lets a process yield to others: it has a lower priority, and is killed first when memory runs out."""

import os
import resource
import sys
import time
from contextlib import suppress
from pathlib import Path

NICENESS = 5  # so that work for other clients goes first
LOWEST = 19  # niceness
SESSION = Path("/proc/self/autogroup")  # the niceness of all processes of a session, against other sessions
SESSION_TRIES, SESSION_SECONDS = 5, 0.1  # the kernel takes one change in this time from all who are not root
FIRST_VICTIM = "1000"  # oom_score_adj: the kernel kills it first if the host runs out of memory


def be_modest() -> None:
    """Lower this process's priority, let it be killed first when memory runs out, and write no core dumps."""
    _yield_to_others(NICENESS)
    _be_the_first_victim()


def be_idle() -> None:
    """Do the same, with the lowest priority: run only when no other process wants the processor.

    The threads that the calling thread starts from now on inherit it.
    """
    _yield_to_others(LOWEST)
    if sys.platform == "linux":
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    _be_the_first_victim()


def _yield_to_others(niceness: int) -> None:
    """Lower the priority in this process's session, and that of the session if the process leads it.

    Where the kernel groups processes by their sessions, the niceness of a process counts only within its own.
    """
    os.nice(niceness)
    if sys.platform == "linux" and os.getsid(0) == os.getpid():
        with suppress(OSError):
            _nice_session(niceness)


def _nice_session(niceness: int) -> None:
    for _ in range(SESSION_TRIES):
        try:
            SESSION.write_text(str(niceness))
            return
        except BlockingIOError:
            time.sleep(SESSION_SECONDS)


def _be_the_first_victim() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(FIRST_VICTIM)
