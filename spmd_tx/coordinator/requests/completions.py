"""Lists the ended sample requests of a client in order, so that one poll can wait for all of them.

A completion's number is the time of its writing in microseconds, increased where needed so that numbers only
grow. It is stored with the outcome, so a number that a client has seen keeps its meaning after a restart. The
unread completions of a polling client are held in memory; the rest is read from the log.
"""

import asyncio
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.wire.futures import SEQ_IDS_PER_CLIENT

MAX_AT_ONCE = 1000  # completions in one answer
MAX_TARGETS = 4096  # clients whose unread completions are held in memory
MAX_UNREAD = 100_000  # completions of one client that are held in memory
MICROSECONDS = 1_000_000


class SamplerClient(NamedTuple):
    """Names one client of a sampler. Each copy of a sampling client in another process has its own number."""

    sampler: str
    client: int  # 0: the one that made the sampler

    @property
    def seq_ids(self) -> range:
        first = self.client * SEQ_IDS_PER_CLIENT
        return range(first, first + SEQ_IDS_PER_CLIENT)


class Completion(NamedTuple):
    """Names a request that has its outcome."""

    number: int
    request_id: str
    failed: bool
    size: int | None = None  # bytes of the result, if known


class CompletionRange(NamedTuple):
    """Selects completions beyond ``after``, up to ``last``, at most ``most`` of them."""

    after: int
    last: int
    most: int


Read = Callable[[SamplerClient, CompletionRange], Awaitable[list[Completion]]]


@dataclass
class _Unread:
    """Holds the completions that a client has not read yet."""

    log_end: int  # completions up to this number may have to be read from the log
    completions: list[Completion] = field(default_factory=list)  # beyond it, in order
    news: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: int = 0  # polls


class Completions:
    """Serves the completions of all samplers to their clients."""

    def __init__(self, last: int, read: Read) -> None:
        """``last`` is the highest number that was ever stored; ``read`` finds completions in the log."""
        self._last = last
        self._announced = last  # all up to this one are durable
        self._read = read
        self._targets: OrderedDict[SamplerClient, _Unread] = OrderedDict()  # the one that asked last is last

    def next_number(self) -> int:
        """A new number for an outcome that is about to be stored."""
        self._last = max(self._last + 1, round(clock.now() * MICROSECONDS))
        return self._last

    def announce(self, line: str, seq_id: int, completion: Completion) -> None:
        """Add a sample request whose outcome is durable. Must be called in the order of the numbers."""
        self._announced = completion.number
        target = SamplerClient(line, seq_id // SEQ_IDS_PER_CLIENT)
        unread = self._targets.get(target)
        if unread is None:
            return
        unread.completions.append(completion)
        unread.news.set()
        if len(unread.completions) > MAX_UNREAD:
            del self._targets[target]

    async def after(self, target: SamplerClient, number: int) -> list[Completion]:
        """The completions beyond the number that a client has seen, in order; MAX_AT_ONCE at most.

        A number that was never given comes from a log that was lost since: such a client gets all.
        """
        number = number if number <= self._last else 0
        unread = self._held(target)
        news = unread.completions
        del news[: bisect_right(news, number, key=attrgetter("number"))]
        if number >= unread.log_end:
            unread.log_end = number
            return news[:MAX_AT_ONCE]
        return await self._from_log(target, number, unread)

    async def wait(self, target: SamplerClient) -> None:
        """Return when there may be more than ``after`` has just returned."""
        unread = self._held(target)
        unread.waiting += 1
        try:
            await unread.news.wait()
        finally:
            unread.waiting -= 1

    async def _from_log(self, target: SamplerClient, number: int, unread: _Unread) -> list[Completion]:
        span = CompletionRange(number, unread.log_end, MAX_AT_ONCE)
        stored = await self._read(target, span)
        if len(stored) == MAX_AT_ONCE or unread.log_end != span.last:
            return stored  # the next call returns the rest
        return [*stored, *unread.completions][:MAX_AT_ONCE]

    def _held(self, target: SamplerClient) -> _Unread:
        """The unread completions of a client that asks; they are held from now on."""
        unread = self._targets.get(target)
        if unread is None:
            unread = self._targets[target] = _Unread(log_end=self._announced)
            self._evict()
        self._targets.move_to_end(target)
        if not unread.completions:
            unread.news.clear()
        return unread

    def _evict(self) -> None:
        """Drop the client that has not asked for longest, but none with a poll, which would not be woken."""
        if len(self._targets) > MAX_TARGETS:
            others = islice(self._targets.items(), len(self._targets) - 1)
            idle = next((target for target, unread in others if not unread.waiting), None)
            if idle is not None:
                del self._targets[idle]


def newest(completions: Sequence[Completion], otherwise: int) -> int:
    """The number up to which an answer with these completions goes."""
    return completions[-1].number if completions else otherwise
