"""Lets each owner have one costly answer at a time, so that their readers do not add up for others."""

import asyncio
import time
from collections import Counter
from collections.abc import Hashable

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
        self._in_line[line] += 1
        try:
            lock = self._lines.setdefault(line, asyncio.Lock())
            await lock.acquire()
            try:
                await self._makers.acquire()
            except BaseException:
                lock.release()
                raise
        except BaseException:
            self._leave(line)
            raise
        return Turn(self, line)

    def made(self) -> None:
        """Let another answer be made."""
        self._makers.release()

    def end(self, line: TurnKey) -> None:
        """Let the next one of a line have its turn."""
        self._lines[line].release()
        self._leave(line)

    def _leave(self, line: TurnKey) -> None:
        self._in_line[line] -= 1
        if not self._in_line[line]:
            del self._in_line[line]
            self._lines.pop(line, None)


class Turn:
    """Is the time in which one answer is made, and sent."""

    def __init__(self, turns: Turns, line: TurnKey) -> None:
        self._turns = turns
        self._line = line
        self._began_at = time.monotonic()
        self._rest: float | None = None  # seconds; None: it is not made yet
        self._has_ended = False

    def made(self) -> None:
        """Note that the answer is made, or failed. A second call changes nothing."""
        if self._rest is None:
            self._rest = min(time.monotonic() - self._began_at, MOST_REST_SECONDS)
            self._turns.made()

    def sent(self) -> None:
        """End the turn, after as long a rest as the answer took to make: others have half of the time.

        A second call changes nothing.
        """
        self.made()
        assert self._rest is not None
        if not self._has_ended:
            self._has_ended = True
            asyncio.get_running_loop().call_later(self._rest, self._turns.end, self._line)
