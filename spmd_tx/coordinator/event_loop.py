"""Runs the coordinator in a loop made for many small requests, beside few threads."""

import asyncio
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

Result = TypeVar("Result")

# How long a thread that computes may keep the loop waiting. Python's default is 5 ms.
SWITCH_SECONDS = 0.0005


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """As asyncio.run does it."""
    sys.setswitchinterval(SWITCH_SECONDS)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)
