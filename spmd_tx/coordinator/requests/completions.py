"""Which sample requests of a client have ended, in order: so that one poll can wait for all of them.

A completion's number is the time of its writing in microseconds, moved on where needed so that numbers only
ever grow. It is stored with the outcome, so a number that a client has seen keeps its meaning after a
restart. What a client that polls was not told yet is held in memory; the rest is read from the log.
"""

import asyncio
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.wire.futures import SEQ_IDS_PER_CLIENT

MOST_AT_ONCE = 1000  # completions in one answer
MOST_TARGETS = 4096  # clients whose news are held in memory though none of them waits; others have them read
MOST_UNTOLD = 100_000  # completions that a client may leave unread, before they are read from the log, too
MICROSECONDS = 1_000_000


class Target(NamedTuple):
    """One client of a sampler. Copies of the sampling client in other processes have numbers of their own."""

    sampler: str
    client: int  # 0: the one that made the sampler

    @property
    def seq_ids(self) -> range:
        first = self.client * SEQ_IDS_PER_CLIENT
        return range(first, first + SEQ_IDS_PER_CLIENT)


class Completion(NamedTuple):
    """A request that has its outcome."""

    number: int
    request_id: str
    failed: bool
    size: int | None = None  # bytes of the result, where that is known


class Span(NamedTuple):
    """Completions beyond ``after``, up to ``last``, at most ``most`` of them."""

    after: int
    last: int
    most: int


Read = Callable[[Target, Span], Awaitable[list[Completion]]]


@dataclass
class _Unread:
    """What a client was not told yet."""

    told: int  # everything up to this number may have to be read from the log
    completions: list[Completion] = field(default_factory=list)  # beyond it, in order
    news: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: int = 0  # polls


class Completions:
    """Of all samplers."""

    def __init__(self, last: int, read: Read) -> None:
        """``last`` is the highest number that was ever stored; ``read`` finds completions in the log."""
        self._last = last
        self._announced = last  # all up to this one are durable
        self._read = read
        self._targets: OrderedDict[Target, _Unread] = OrderedDict()  # the one that asked last is last

    def next_number(self) -> int:
        """For an outcome that is about to be stored."""
        self._last = max(self._last + 1, round(clock.now() * MICROSECONDS))
        return self._last

    def announce(self, line: str, seq_id: int, completion: Completion) -> None:
        """A sample request's outcome is durable. Called in the order of the numbers."""
        self._announced = completion.number
        target = Target(line, seq_id // SEQ_IDS_PER_CLIENT)
        untold = self._targets.get(target)
        if untold is None:
            return
        untold.completions.append(completion)
        untold.news.set()
        if len(untold.completions) > MOST_UNTOLD:
            del self._targets[target]

    async def after(self, target: Target, number: int) -> list[Completion]:
        """What the client was not told, if it was told everything up to a number; in order, maybe not all.

        A number that was never given comes from a log that was lost since: such a client is told everything.
        """
        number = number if number <= self._last else 0
        untold = self._look_at(target)
        news = untold.completions
        del news[: bisect_right(news, number, key=_number)]
        if number >= untold.told:
            untold.told = number
            return news[:MOST_AT_ONCE]
        return await self._from_log(target, number, untold)

    async def wait(self, target: Target) -> None:
        """Return when there may be more than ``after`` gave just now."""
        untold = self._look_at(target)
        untold.waiting += 1
        try:
            await untold.news.wait()
        finally:
            untold.waiting -= 1

    async def _from_log(self, target: Target, number: int, untold: _Unread) -> list[Completion]:
        span = Span(number, untold.told, MOST_AT_ONCE)
        found = await self._read(target, span)
        if len(found) == MOST_AT_ONCE or untold.told != span.last:
            return found  # the rest the next time
        return [*found, *untold.completions][:MOST_AT_ONCE]

    def _look_at(self, target: Target) -> _Unread:
        """What is held for a client that asks; from now on it is."""
        untold = self._targets.get(target)
        if untold is None:
            untold = self._targets[target] = _Unread(told=self._announced)
            self._make_room()
        self._targets.move_to_end(target)
        if not untold.completions:
            untold.news.clear()
        return untold

    def _make_room(self) -> None:
        """Forget whoever has not asked for longest. A poll that waits would never be woken."""
        if len(self._targets) > MOST_TARGETS:
            others = islice(self._targets.items(), len(self._targets) - 1)
            idle = next((target for target, untold in others if not untold.waiting), None)
            if idle is not None:
                del self._targets[idle]


def newest(completions: Sequence[Completion], otherwise: int) -> int:
    """Up to where a client is told by this answer."""
    return completions[-1].number if completions else otherwise


def _number(completion: Completion) -> int:
    return completion.number
