"""Gives the same answer to all who ask for the same at about the same time, such as several open consoles."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar

KEPT_SECONDS = 1.0

T = TypeVar("T")


class SharedAnswers:
    """Holds the answers of the last KEPT_SECONDS, and those that are being made."""

    def __init__(self) -> None:
        self._answers: dict[Hashable, tuple[float, asyncio.Future[Any]]] = {}  # with the time of the question

    async def get(self, key: Hashable, make: Callable[[], Awaitable[T]]) -> T:
        """Return the answer under a key. It is made at once, unless it was asked for a moment ago."""
        now = time.monotonic()
        for old in [key for key, (at, _) in self._answers.items() if at < now - KEPT_SECONDS]:
            del self._answers[old]
        if key not in self._answers:
            self._answers[key] = now, asyncio.ensure_future(make())
        return await asyncio.shield(self._answers[key][1])  # others wait for it, even if this one leaves
