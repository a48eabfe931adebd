"""Room for a number of bytes, which those who come first get first. Who finds none waits."""

import asyncio
from collections import deque


class ByteBudget:
    """In memory, for things that are large. Whatever is larger than all of it counts as all of it."""

    def __init__(self, capacity: int) -> None:
        self.free = self._capacity = capacity  # bytes
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    async def take(self, size: int) -> int:
        """Return when there is room; how many bytes were taken, which must be given back."""
        size = min(size, self._capacity)
        if not self._waiting and size <= self.free:
            self.free -= size
            return size
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, size))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                self.give_back(size)
            else:
                self._waiting = deque(each for each in self._waiting if each[0] is not turn)
                self._let_in()
            raise
        return size

    def give_back(self, size: int) -> None:
        self.free += size
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self._waiting[0][1] <= self.free:
            turn, size = self._waiting.popleft()
            if not turn.done():
                self.free -= size
                turn.set_result(None)
