"""Quotas of keys and owners: requests and polls per second, sessions, metadata, metrics, samples, models."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from sqlalchemy import exists, func, select

from spmd_tx.bounds import Bounds
from spmd_tx.coordinator.catalog.catalog import Catalog
from spmd_tx.coordinator.requests.queue import RequestQueue
from spmd_tx.coordinator.storage.database import Database
from spmd_tx.coordinator.storage.tables import ModelRow, RequestRow, SessionRow
from spmd_tx.coordinator.tenancy.callers import Caller
from spmd_tx.errors import InvalidRequest, TooManyRequests

SECONDS_OF_BURST = 1.0  # this many seconds' worth of requests may come at once
DAY_SECONDS = 24 * 3600.0
SECONDS_OF_POLLS = 10.0  # burst of polls, many of which end at the same time
POLLS_OF_IDLERS, POLLS_PER_REQUEST = 20.0, 10.0  # polls per second: fixed, and for each request per second
SAMPLE_AGAIN_SECONDS = 1.0  # the SDK's own pause

# Prompts and max_tokens of all queued sample requests. At 40 bytes a token their prompts take up to 1.3 GB of
# memory, and a device that draws 20,000 tokens a second needs half an hour for them.
MOST_QUEUED_TOKENS = 32 << 20


class Quotas:
    """Enforces the quotas of all keys and owners. Keys without limits cost nothing."""

    def __init__(
        self,
        database: Database,
        catalog: Catalog,
        queue: RequestQueue,
        bounds: Bounds,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.most_queued_tokens = MOST_QUEUED_TOKENS
        self._database = database
        self._catalog = catalog
        self._queue = queue
        self._bounds = bounds
        self._clock = clock
        # Tokens that are left, and when; by what is counted, and the id of a key or owner.
        self._buckets: dict[tuple[str, str], tuple[float, float]] = {}
        self._coming: Counter[str] = Counter()  # sample requests about to be queued, by owner
        self._coming_tokens: Counter[str] = Counter()  # tokens of those
        self._creating = asyncio.Lock()

    def count_request(self, caller: Caller) -> None:
        """Count a request. Raises TooManyRequests, upon which the SDK waits and sends the same again."""
        rate = caller.limits.requests_per_second
        if rate is None:
            return
        seconds = self._take("requests", caller.key_id or "", rate, max(1.0, rate * SECONDS_OF_BURST))
        if seconds:
            raise TooManyRequests(f"API key {caller.key_id} may send {rate:g} requests per second", seconds)

    def count_poll(self, caller: Caller) -> None:
        """Count a request that the SDK sends by itself, within what it can need. Raises TooManyRequests."""
        if caller.key_id is None:
            return
        rate, requests = float(self._bounds.polls_per_second), caller.limits.requests_per_second
        if requests is not None:
            rate = min(rate, POLLS_OF_IDLERS + POLLS_PER_REQUEST * requests)
        seconds = self._take("polls", caller.key_id, rate, rate * SECONDS_OF_POLLS)
        if seconds:
            raise TooManyRequests(
                f"API key {caller.key_id} may poll, or send heartbeats, {rate:g} times per second", seconds
            )

    def _take(self, what: str, whose: str, per_second: float, full: float, count: float = 1) -> float:
        """Take ``count`` tokens from a bucket and return 0, or return the seconds until there are enough."""
        now = self._clock()
        left, filled_at = self._buckets.get((what, whose), (full, now))
        left = min(full, left + (now - filled_at) * per_second)
        has_enough = left >= count
        self._buckets[what, whose] = left - count if has_enough else left, now
        return 0.0 if has_enough else (count - left) / per_second

    async def check_session(self, caller: Caller, size: int) -> None:
        """Raise InvalidRequest when the owner may not create another session, with ``size`` bytes of data."""
        owner, bounds = caller.owner, self._bounds
        count = self._catalog.open_sessions_of(owner)
        if count >= bounds.open_sessions:
            raise InvalidRequest(
                f"{owner!r} has {count} open sessions, the most that one owner may have; close clients that "
                "are no longer used, or ask the operator to raise the limit open_sessions"
            )
        most = bounds.sessions_per_day
        if self._take("sessions", owner, most / DAY_SECONDS, float(most)):
            raise InvalidRequest(
                f"{owner!r} has created {most} sessions in a day, the most that one owner may create; use "
                "one client for several runs, or ask the operator to raise the limit sessions_per_day"
            )
        self.check_metadata(caller, size)

    def check_metadata(self, caller: Caller, size: int) -> None:
        """Raise InvalidRequest when ``size`` more bytes exceed the owner's metadata per day."""
        most = self._bounds.metadata_bytes_per_day
        if self._take("metadata", caller.owner, most / DAY_SECONDS, float(most), size):
            raise InvalidRequest(
                f"the sessions and models that {caller.owner!r} created in the last day have {most} bytes of "
                "labels and metadata, the most that one owner may have. Shorten them, or ask the operator to "
                "raise the limit metadata_bytes_per_day"
            )

    def check_metrics(self, caller: Caller, size: int) -> None:
        """Raise TooManyRequests when ``size`` more bytes exceed the owner's metrics per day."""
        most = self._bounds.metrics_bytes_per_day
        seconds = self._take("metrics", caller.owner, most / DAY_SECONDS, float(most), size)
        if seconds:
            raise TooManyRequests(
                f"{caller.owner!r} has sent {most} bytes of metrics in a day, the most that one owner may "
                "send. Send fewer, or ask the operator to raise the limit metrics_bytes_per_day",
                seconds,
            )

    @asynccontextmanager
    async def room_for_sample(self, caller: Caller, tokens: int, requests: int = 1) -> AsyncIterator[None]:
        """Count sample requests with ``tokens`` in all while the block puts them into the queue.

        Raises TooManyRequests, upon which the SDK holds all of its samples back for a second. Training
        requests are never refused like this: later ones of a call can be in the queue before the first one,
        and would wait for it while they leave no room.
        """
        await self._check_backlog(caller.owner, tokens)
        most = caller.limits.queued_requests
        if most is not None and requests > most:
            raise InvalidRequest(
                f"this call makes {requests} sample requests, one for each prompt, and API key "
                f"{caller.key_id} allows {most} in the queue; send at most {most} prompts at once"
            )
        self._coming[caller.owner] += requests
        self._coming_tokens[caller.owner] += tokens
        try:
            await self._check_limits(caller, requests)
            yield
        finally:
            self._coming[caller.owner] -= requests
            self._coming_tokens[caller.owner] -= tokens

    @asynccontextmanager
    async def room_for_adapter(self, caller: Caller, model_id: str) -> AsyncIterator[None]:
        """Check the quota while the block creates a model. Raises InvalidRequest: waiting would not help."""
        limit = caller.limits.adapters
        if limit is None:
            yield
            return
        async with self._creating:
            count = await self._adapters(caller.owner, model_id)
            if count >= limit:
                raise InvalidRequest(
                    f"{caller.owner!r} has {count} adapters, and API key {caller.key_id} allows {limit}; "
                    "close a client (its session ends with its adapters), or ask the operator for more"
                )
            yield

    async def _check_limits(self, caller: Caller, new: int) -> None:
        """Check the key's limits. One call alone may have any number of tokens: it would wait for ever."""
        limits, owner = caller.limits, caller.owner
        if limits.queued_requests is None and limits.queued_tokens is None:
            return
        requests, tokens = await self._queued(owner)
        if limits.queued_requests is not None and requests > limits.queued_requests:
            raise TooManyRequests(
                f"{owner!r} has {min(requests - new, limits.queued_requests)} sample requests in the queue, "
                f"this call makes {new}, and API key {caller.key_id} allows {limits.queued_requests}",
                SAMPLE_AGAIN_SECONDS,
            )
        if limits.queued_tokens is not None and tokens > limits.queued_tokens and requests > new:
            raise TooManyRequests(
                f"with this one the samples of {owner!r} in the queue would take {tokens:,} tokens (prompts "
                f"and max_tokens of all), and API key {caller.key_id} allows {limits.queued_tokens:,}",
                SAMPLE_AGAIN_SECONDS,
            )

    async def _check_backlog(self, owner: str, tokens: int) -> None:
        """Refuse owners with more than an even share while the queue is too long."""
        if self._queue.samples.total_tokens + self._coming_tokens.total() + tokens <= self.most_queued_tokens:
            return
        queued = Counter(self._coming_tokens)
        for session_id, of_session in list(self._queue.samples.tokens.items()):
            queued[(await self._catalog.session(session_id)).owner] += of_session
        queued = +queued  # drops owners without any
        share = self.most_queued_tokens / len(queued | Counter([owner]))
        if queued[owner] and queued[owner] + tokens > share:
            raise TooManyRequests(
                f"samples of {queued.total():,} tokens are queued, prompts and max_tokens of all of them "
                f"together, {queued[owner]:,} of them for {owner!r}; these {tokens:,} tokens have to wait",
                SAMPLE_AGAIN_SECONDS,
            )

    async def _queued(self, owner: str) -> tuple[int, int]:
        """Return an owner's sample requests and their tokens, queued or about to be."""
        requests, tokens = self._coming[owner], self._coming_tokens[owner]
        samples = self._queue.samples
        for session_id, of_session in list(samples.requests.items()):
            if (await self._catalog.session(session_id)).owner == owner:
                requests += of_session
                tokens += samples.tokens[session_id]
        return requests, tokens

    async def _adapters(self, owner: str, besides: str) -> int:
        """Count an owner's models in open sessions, without those whose creation failed."""
        has_failed = exists().where(
            RequestRow.line == ModelRow.id, RequestRow.seq_id == 0, RequestRow.error.is_not(None)
        )
        query = (
            select(func.count())
            .select_from(ModelRow)
            .join(SessionRow, SessionRow.id == ModelRow.session_id)
            .where(
                SessionRow.owner == owner, SessionRow.ended_at.is_(None), ModelRow.id != besides, ~has_failed
            )
        )
        async with self._database.reading() as db:
            return await db.scalar(query) or 0
