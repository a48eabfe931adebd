"""A FIFO semaphore counted in bytes, which bounds the memory that large things take."""

import asyncio
from collections import deque


class ByteBudget:
    """Grants bytes in the order of requests. A request for more than the capacity gets all of it."""

    def __init__(self, capacity: int) -> None:
        self.free = self._capacity = capacity  # bytes
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    async def take(self, size: int) -> int:
        """Wait for free bytes. The result is how many were taken, which must be given back."""
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
                self._grant()
            raise
        return size

    def give_back(self, size: int) -> None:
        self.free += size
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self._waiting[0][1] <= self.free:
            turn, size = self._waiting.popleft()
            if not turn.done():
                self.free -= size
                turn.set_result(None)
