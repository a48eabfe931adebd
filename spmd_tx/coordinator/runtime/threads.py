"""Where computing happens: small work at once, in the loop; large work in one of a few threads.

A thread costs a loop that is busy more than it saves: each time one of them is handed the interpreter,
others wait for up to a switch interval. So what takes less than a millisecond is done where it is.
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
    """Do work that goes through ``size`` bytes, without keeping the loop from others for long.

    In a thread it is marked as work for the request that it is done for. When one thing at a time is to be
    done, because some request may end the process, it is done in the loop.
    """
    mark = at_work.current()
    if size < SMALL_BYTES or (mark is not None and mark.is_careful):
        return work(*arguments, **options)

    def marked() -> Result:
        with mark or nullcontext():
            return work(*arguments, **options)

    return await asyncio.get_running_loop().run_in_executor(_threads, marked)
