"""Shares a few places among owners, so that none waits because another one fills them all."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass

# On whose behalf code runs, in the task of a request: its owner, or its session where that is not at hand.
OWNER: ContextVar[str] = ContextVar("OWNER", default="")


@dataclass
class _Line:
    has_turn: asyncio.Semaphore
    users: int = 0  # at work or waiting


class OwnerTurns:
    """Holds the places, and a line of those who wait for each owner."""

    def __init__(self, places: int, most_of_one: int) -> None:
        """An owner has ``most_of_one`` at a time; with fewer than all, another one always finds a place."""
        self._places = asyncio.Semaphore(places)
        self._most_of_one = most_of_one
        self._lines: dict[str, _Line] = {}  # only those that are in use

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Wait for a place, and hold it in the block."""
        line = self._lines.setdefault(owner, _Line(asyncio.Semaphore(self._most_of_one)))
        line.users += 1
        try:
            async with line.has_turn, self._places:
                yield
        finally:
            line.users -= 1
            if not line.users:
                del self._lines[owner]
