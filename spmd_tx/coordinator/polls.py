"""Clients that wait for something on the server, each for a while; none when the server closes."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class Polls:
    """All that are under way, so that the end of the server is one callback, not one of each."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Task[Any]] = set()
        self._is_watching = False

    async def wait(
        self, work: Coroutine[Any, Any, Result], closing: asyncio.Future[None], seconds: float
    ) -> asyncio.Task[Result] | None:
        """Wait for something, unless the server closes or it takes too long; then it is given up."""
        if closing.done():
            work.close()
            return None
        if not self._is_watching:
            self._is_watching = True
            closing.add_done_callback(self._let_go)
        task = asyncio.create_task(work)
        self._waiting.add(task)
        try:
            await asyncio.wait([task], timeout=seconds)
            return task if task.done() and not task.cancelled() else None
        finally:
            self._waiting.discard(task)
            task.cancel()

    def _let_go(self, _: asyncio.Future[None]) -> None:
        for task in self._waiting:
            task.cancel()
