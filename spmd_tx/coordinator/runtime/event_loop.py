"""Runs the coordinator in an event loop that is tuned for many small requests beside a few threads."""

import asyncio
import gc
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

Result = TypeVar("Result")

# How long a thread that computes may keep the loop waiting. Python's default is 5 ms.
SWITCH_SECONDS = 0.0005

# Thresholds of the three generations of the garbage collector. Hardly anything here is in a cycle, and with
# Python's defaults a busy loop spent an eighth of its time in the collector.
GC_THRESHOLDS = (20_000, 20, 20)


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run work to its end, as asyncio.run does."""
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.freeze()  # imported modules are never garbage
    gc.set_threshold(*GC_THRESHOLDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)
