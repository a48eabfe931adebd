"""Runs coroutines beside each other until the first of them ends."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def until_one_ends(works: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """Run all until one ends, then end the others. Raises the error of the first that has one."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        errors = [task.exception() for task in tasks if task.done() and not task.cancelled()]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    error = next((error for error in errors if error is not None), None)
    if error is not None:
        raise error
