"""Runs computing work: small work at once in the event loop, large work in one of a few threads.

For small work a thread costs a busy loop more than it saves: each time the interpreter is handed over, others
wait for up to a switch interval. So work of less than a millisecond stays in the loop.
"""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import ParamSpec, TypeVar

from spmd_tx.coordinator.runtime import at_work

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

SMALL_BYTES = 64 << 10  # of a body, or of arrays; about a millisecond's work

_threads = ThreadPoolExecutor(max(2, min(4, os.cpu_count() or 1)), thread_name_prefix="compute")


async def compute(
    size: int, work: Callable[Arguments, Result], *arguments: Arguments.args, **options: Arguments.kwargs
) -> Result:
    """Do work on ``size`` bytes without blocking the loop for long.

    In a thread, the work carries the mark of the current request. It stays in the loop while requests must
    run one at a time, because one of them may end the process.
    """
    mark = at_work.current()
    if size < SMALL_BYTES or (mark is not None and mark.is_careful()):
        return work(*arguments, **options)

    def marked() -> Result:
        with mark or nullcontext():
            return work(*arguments, **options)

    return await asyncio.get_running_loop().run_in_executor(_threads, marked)
