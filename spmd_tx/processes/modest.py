"""Lets a process yield to others: it has a lower priority, and is killed first when memory runs out."""

import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

NICENESS = 5  # so that work for other clients goes first
LOWEST = 19  # niceness
FIRST_VICTIM = "1000"  # oom_score_adj: the kernel kills it first if the host runs out of memory


def be_modest() -> None:
    """Lower this process's priority, let it be killed first when memory runs out, and write no core dumps."""
    os.nice(NICENESS)
    _be_the_first_victim()


def be_idle() -> None:
    """Do the same, with the lowest priority: run only when no other process wants the processor.

    The threads that the calling thread starts from now on inherit it.
    """
    os.nice(LOWEST)
    if sys.platform == "linux":
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    _be_the_first_victim()


def _be_the_first_victim() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(FIRST_VICTIM)
