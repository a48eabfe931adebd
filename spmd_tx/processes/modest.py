"""For processes that are not to be in the way of others: behind them for the processor, before them to go."""

import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

NICENESS = 5  # clients who wait for others come first
FIRST_VICTIM = "1000"  # if the host runs out of memory


def be_modest() -> None:
    """Make this process one of them, which leaves no core either."""
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text(FIRST_VICTIM)
