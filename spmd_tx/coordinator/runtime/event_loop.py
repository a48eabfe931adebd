"""Runs the coordinator in a loop made for many small requests, beside few threads."""

import asyncio
import gc
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

Result = TypeVar("Result")

# How long a thread that computes may keep the loop waiting. Python's default is 5 ms.
SWITCH_SECONDS = 0.0005

# New objects until a look for cycles among them, and how many of those looks until the next generation's.
# Nearly nothing here is in a cycle; by default an eighth of the time of a busy loop went into looking.
COLLECTIONS = (20_000, 20, 20)


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """As asyncio.run does it."""
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.freeze()  # what was imported stays
    gc.set_threshold(*COLLECTIONS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)
