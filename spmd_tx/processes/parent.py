"""Ends a child process together with the process that has started it, however that one ends."""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1

# Runs first in a new process, and then becomes the command. It asks the kernel to kill it when the process
# that has started it is gone, however that happened, and before that one when there is no memory left.
DIE_WITH_PARENT = """\
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
VICTIM = 500  # for the OOM killer: a worker is restarted sooner than the server
parent, *command = sys.argv[1:]
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with open("/proc/self/oom_score_adj", "r+") as score:
        score.write(str(min(1000, int(score.read()) + VICTIM)))
if os.getppid() == int(parent):
    os.execv(command[0], command)
"""


def tied(command: Sequence[str]) -> list[str]:
    """Return a command that runs another one, which ends with this thread; it begins with a full path."""
    return [sys.executable, "-I", "-S", "-c", DIE_WITH_PARENT, str(os.getpid()), *command]


def end_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that has started it is gone, even if it is stopped.

    ``parent`` is the id of that thread's process; SystemExit if it is gone already. Only Linux can do this.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that wanted an answer is gone")
