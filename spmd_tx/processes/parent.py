"""Ends a child process together with the process that has started it, however that one ends."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that has started it is gone, even if it is stopped.

    ``parent`` is the id of that thread's process; SystemExit if it is gone already. Only Linux can do this.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the process that wanted an answer is gone")
