"""Gives the same answer to all who ask for the same at about the same time, such as several open consoles."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar

KEPT_SECONDS = 1.0
COSTLY_TIMES = 20  # so an answer that is asked for again and again takes a twentieth of the time at most
MOST_SECONDS = 10.0  # for which a costly answer is kept

T = TypeVar("T")


class SharedAnswers:
    """Holds answers until they are too old, and those that are being made."""

    def __init__(self) -> None:
        self._answers: dict[Hashable, tuple[float, asyncio.Future[Any]]] = {}  # each with its end

    async def get(self, key: Hashable, make: Callable[[], Awaitable[T]]) -> T:
        """Return the answer under a key. It is made at once, unless it was asked for a moment ago."""
        return await self._get(key, make, time.monotonic() + KEPT_SECONDS)

    async def get_costly(self, key: Hashable, make: Callable[[], Awaitable[T]]) -> T:
        """Return the answer under a key, which is kept for COSTLY_TIMES as long as it took to make."""

        async def timed() -> T:
            start = time.monotonic()
            seconds = 0.0  # an error is not kept
            try:
                answer = await make()
                seconds = min(MOST_SECONDS, COSTLY_TIMES * (time.monotonic() - start))
                return answer
            finally:
                self._answers[key] = time.monotonic() + seconds, self._answers[key][1]

        return await self._get(key, timed, math.inf)

    async def _get(self, key: Hashable, make: Callable[[], Awaitable[T]], until: float) -> T:
        now = time.monotonic()
        for old in [key for key, (end, _) in self._answers.items() if end < now]:
            del self._answers[old]
        if key not in self._answers:
            self._answers[key] = until, asyncio.ensure_future(make())
        return await asyncio.shield(self._answers[key][1])  # others wait for it, even if this one leaves
