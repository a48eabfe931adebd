"""Lets each owner have one costly answer at a time, so that their readers do not add up for others."""

import asyncio
import time
from collections import Counter
from collections.abc import Hashable
from contextlib import ExitStack

from spmd_tx.bounds import Bounds
from spmd_tx.errors import TooManyRequests

RETRY_SECONDS = 1.0  # after which a refused client asks again
MOST_REST_SECONDS = 2.0  # between two answers of an owner

TurnKey = tuple[str, Hashable]  # an owner, and what is waited for


class Turns:
    """Holds the lines of those who wait: one for each owner, and one for all."""

    def __init__(self, bounds: Bounds) -> None:
        self._most_waiting = bounds.answers_waiting
        self._lines: dict[TurnKey, asyncio.Lock] = {}  # only those that are in use
        self._in_line: Counter[TurnKey] = Counter()  # at work, resting or waiting
        self._makers = asyncio.Semaphore(bounds.answers_at_once)

    async def take(self, owner: str, what: Hashable) -> "Turn":
        """Wait for a turn. Raises TooManyRequests when too many of the owner's wait."""
        line = owner, what
        if self._in_line[line] > self._most_waiting:
            raise TooManyRequests(
                f"{owner!r} waits for {self._most_waiting} answers of this kind at a time, the maximum (the "
                "operator raises the limit answers_waiting)",
                RETRY_SECONDS,
            )
        with ExitStack() as end:
            self._in_line[line] += 1
            end.callback(self._leave, line)
            lock = self._lines.setdefault(line, asyncio.Lock())
            await lock.acquire()
            end.callback(lock.release)
            await self._makers.acquire()
            return Turn(self._makers, end.pop_all())

    def _leave(self, line: TurnKey) -> None:
        self._in_line[line] -= 1
        if not self._in_line[line]:
            del self._in_line[line]
            self._lines.pop(line, None)


class Turn:
    """Is the time in which one answer is made, and sent."""

    def __init__(self, makers: asyncio.Semaphore, end: ExitStack) -> None:
        """``end`` lets the next one of the line have its turn."""
        self._makers = makers
        self._end = end
        self._began_at = time.monotonic()
        self._rest: float | None = None  # seconds; None: it is not made yet

    def made(self) -> float:
        """Note that the answer is made, or failed, and return for how long its owner rests then.

        A second call changes nothing.
        """
        if self._rest is None:
            self._rest = min(time.monotonic() - self._began_at, MOST_REST_SECONDS)
            self._makers.release()
        return self._rest

    def sent(self) -> None:
        """End the turn, after as long a rest as the answer took to make: others have half of the time.

        A second call changes nothing.
        """
        asyncio.get_running_loop().call_later(self.made(), self._end.close)
