"""Gathers the signs that a generation of workers is lost, from everybody who may notice one."""

import asyncio

from spmd_tx.coordinator.mesh.loss_causes import LossSign


class LossSigns:
    """Holds the signs of one generation, until the next one begins."""

    def __init__(self) -> None:
        self.seen: list[LossSign] = []
        self._is_closed = False
        self._arrival = asyncio.Event()

    def add(self, sign: LossSign) -> None:
        if not self._is_closed:
            self.seen.append(sign)
            self._arrival.set()

    async def any(self) -> None:
        """Return when there is a sign."""
        await self._arrival.wait()

    async def another(self) -> None:
        """Return when one more has come."""
        self._arrival.clear()
        await self._arrival.wait()

    def clear(self) -> None:
        self.seen.clear()
        self._arrival.clear()

    def close(self) -> None:
        """Take no more: the workers are about to be stopped."""
        self._is_closed = True
