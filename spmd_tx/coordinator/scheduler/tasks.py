"""The asyncio tasks of one generation of workers."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Tasks:
    """Runs tasks, and keeps an unforeseen error of one of them for whoever drives the generation."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake  # called when there is such an error
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: BaseException | None = None

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self.notice)
        return task

    def notice(self, task: asyncio.Task[None]) -> None:
        """Keep the error of a task that has ended."""
        if not task.cancelled() and task.exception() is not None:
            self._error = task.exception()
            self._wake()

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    async def wait(self) -> None:
        """Wait until no task is left."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()


async def uninterrupted(work: Coroutine[Any, Any, None]) -> None:
    """Do work to its end, even when the caller is cancelled."""
    task = asyncio.create_task(work)
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            continue
