"""Child processes for foreign code on what clients send, shared among owners.

Hostile input ends the child that reads it. So there is one child more than are at work, which is made ready
for the next call, and an owner whose calls have ended children waits for others to start, not its neighbours.
"""

import asyncio
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from spmd_tx.coordinator.runtime.owner_turns import OWNER, OwnerTurns
from spmd_tx.errors import ForeignCodeFailed, RequestError
from spmd_tx.processes.child import Allowance, LastingChild

SPARE = 1
IDLE_SECONDS = 60.0  # after which they end
COSTLY_SECONDS = 60.0  # for which an owner is known to have ended a child
MOST_COSTLY = 1000  # owners that are remembered


class OutsideCall(NamedTuple):
    """A function of a child process, as LastingChild.call takes it."""

    function: str
    arguments: Mapping[str, object]


class SharedChildren:
    """Calls functions in child processes, on behalf of the owner of the present task."""

    def __init__(self, allowance: Allowance, at_work: int, of_one: int) -> None:
        """At most ``at_work`` calls run at a time, and ``of_one`` owner's, so that others need not wait."""
        self._children = [LastingChild(allowance, IDLE_SECONDS) for _ in range(at_work + SPARE)]
        self._free = list(self._children)
        self._turns = OwnerTurns(at_work, of_one)
        self._costly = dict[str, float]()  # when an owner's call has last ended a child, s
        self._preparing: asyncio.Task[None] | None = None

    async def close(self) -> None:
        """End the child processes. No call may be at work."""
        if self._preparing is not None:
            self._preparing.cancel()
            await asyncio.wait([self._preparing])
        for child in self._children:
            await child.close()

    async def call(self, call: OutsideCall, preparation: OutsideCall | None = None) -> Any:
        """Call a function. Raises ForeignCodeFailed, and its RequestError or OSError.

        If the child ends by it, the next one makes the call ``preparation`` before it is needed.
        """
        owner = OWNER.get()
        async with self._turns.turn(owner):
            child = self._take(owner)
            try:
                return await child.call(*call)
            except ForeignCodeFailed:
                if len(self._costly) >= MOST_COSTLY:
                    self._costly.clear()
                self._costly[owner] = time.monotonic()
                raise
            finally:
                self._give_back(child, preparation)

    def _take(self, owner: str) -> LastingChild:
        """Return a child that has started; for a costly owner one that has not."""
        is_costly = time.monotonic() < self._costly.get(owner, -math.inf) + COSTLY_SECONDS
        chosen = min if is_costly else max
        child = chosen(reversed(self._free), key=lambda child: child.is_running)
        self._free.remove(child)
        return child

    def _give_back(self, child: LastingChild, preparation: OutsideCall | None) -> None:
        if child.is_running or preparation is None or self._preparing is not None:
            self._free.append(child)
        else:
            self._preparing = asyncio.create_task(self._prepare(child, preparation))

    async def _prepare(self, child: LastingChild, preparation: OutsideCall) -> None:
        try:
            with suppress(ForeignCodeFailed, RequestError, OSError):
                await child.call(*preparation)
        finally:
            self._free.append(child)
            self._preparing = None
