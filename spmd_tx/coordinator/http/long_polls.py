"""Long polls: requests that wait on the server for a result, until a timeout or until the server closes."""

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any, TypeVar

from spmd_tx.errors import TooManyRequests

Result = TypeVar("Result")

RETRY_SECONDS = 1.0  # after which a refused client polls again


class Polls:
    """Holds the polls in progress, and ends them all when the server closes."""

    def __init__(self, most_per_owner: int, closing: asyncio.Future[None]) -> None:
        self._most_per_owner = most_per_owner
        self._of_owner: Counter[str] = Counter()  # only owners with polls
        self._waiting: set[asyncio.Task[Any]] = set()
        self._closing = closing
        closing.add_done_callback(self._let_go)

    async def wait(
        self, owner: str, work: Coroutine[Any, Any, Result], seconds: float
    ) -> asyncio.Task[Result] | None:
        """Run ``work`` to its end; cancel it and return None after ``seconds`` or when the server closes.

        Raises TooManyRequests, upon which the SDK polls again a little later.
        """
        if self._closing.done():
            work.close()
            return None
        if self._of_owner[owner] >= self._most_per_owner:
            work.close()
            raise TooManyRequests(
                f"{owner!r} waits for {self._most_per_owner} results at a time, the maximum (the operator "
                "raises the limit polls)",
                RETRY_SECONDS,
            )
        self._of_owner[owner] += 1
        task = asyncio.create_task(work)
        self._waiting.add(task)
        try:
            await asyncio.wait([task], timeout=seconds)
            return task if task.done() and not task.cancelled() else None
        finally:
            self._waiting.discard(task)
            task.cancel()
            self._of_owner[owner] -= 1
            if not self._of_owner[owner]:
                del self._of_owner[owner]

    def _let_go(self, _: asyncio.Future[None]) -> None:
        for task in self._waiting:
            task.cancel()
