"""Tells open pages of the console which runs have changed. One task looks for all of them.

Pages whose callers see the same get the same encoded event, and a page that has no news costs nothing.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterable

import msgspec

from spmd_tx.bounds import Bounds
from spmd_tx.coordinator.catalog.catalog import Catalog
from spmd_tx.coordinator.requests.runs.run_news import RunNews
from spmd_tx.coordinator.runtime import containment
from spmd_tx.coordinator.storage.outages import OUTAGES
from spmd_tx.coordinator.tenancy.callers import Caller
from spmd_tx.coordinator.tenancy.keyring import Keyring
from spmd_tx.errors import Forbidden, NotFound, TooManyRequests

KEY_SECONDS = 0.25  # between two looks whether keys are valid
ALIVE_SECONDS = 15.0  # between two signs of life
MOST_BEHIND = 60  # events that a slow reader can still get
RETRY_SECONDS = 10.0  # after which a refused page may ask again
ALIVE = b": alive\r\n\r\n"


class NewsStreams:
    """Holds the streams, and tells all of them of news."""

    def __init__(self, news: RunNews, catalog: Catalog, keyring: Keyring, bounds: Bounds) -> None:
        self._news = news
        self._catalog = catalog
        self._keyring = keyring
        self._most_of_owner = bounds.console_streams
        self._most = bounds.console_streams_in_all
        self._listeners: set[_Listener] = set()
        self._telling: asyncio.Task[None] | None = None

    def check(self, caller: Caller) -> None:
        """Raise TooManyRequests when there are too many streams; pages ask by themselves then."""
        owner = caller.owner
        if sum(each.caller.owner == owner for each in self._listeners) >= self._most_of_owner:
            raise TooManyRequests(
                f"{owner!r} has {self._most_of_owner} streams of news, the maximum; close pages that are not "
                "looked at (the operator raises the limit console_streams)",
                RETRY_SECONDS,
            )
        if len(self._listeners) >= self._most:
            raise TooManyRequests(
                f"{self._most} streams of news are open, the maximum of this server (the operator raises the "
                "limit console_streams_in_all)",
                RETRY_SECONDS,
            )

    async def events(self, caller: Caller, closing: asyncio.Future[None]) -> AsyncIterator[bytes]:
        """Yield events for one page, until its key is revoked, it reads too slowly or the server closes."""
        try:
            self.check(caller)  # again: others may have come since
        except TooManyRequests:
            return
        listener = _Listener(caller)
        self._listeners.add(listener)
        if self._telling is None:
            self._telling = asyncio.create_task(self._tell(closing))
        try:
            async for event in listener.events():
                yield event
        finally:
            self._listeners.discard(listener)

    async def _tell(self, closing: asyncio.Future[None]) -> None:
        """Look for news, and whether keys are valid, as long as there are listeners."""
        try:
            while self._listeners and not closing.done():
                await asyncio.wait([closing], timeout=min(KEY_SECONDS, self._news.seconds_left()))
                self._end_revoked()
                runs = self._news.tell()
                if runs:
                    await self._spread(runs)
        except OUTAGES:
            pass  # pages ask again, and are told why by the routes that they ask
        except BaseException as error:
            containment.report(error, "telling consoles of news")
        finally:
            self._telling = None
            for listener in self._listeners:
                listener.end()

    def _end_revoked(self) -> None:
        revoked = set[Caller]()
        for caller in {listener.caller for listener in self._listeners}:
            try:
                self._keyring.vouch(caller)
            except Forbidden:
                revoked.add(caller)
        for listener in self._listeners if revoked else ():
            if listener.caller in revoked:
                listener.end()

    async def _spread(self, runs: Iterable[str]) -> None:
        owners = {run: await self._owner(run) for run in runs}
        events = dict[tuple[bool, str], bytes | None]()  # by what a caller sees
        for listener in list(self._listeners):
            caller = listener.caller
            sight = caller.role == "admin", caller.owner
            if sight not in events:
                seen = [run for run, owner in owners.items() if owner is not None and caller.sees(owner)]
                events[sight] = _event(seen) if seen else None
            listener.hear(events[sight])

    async def _owner(self, run: str) -> str | None:
        try:
            model = await self._catalog.model(run)
            return (await self._catalog.session(model.session_id)).owner
        except NotFound:
            return None


class _Listener:
    """Waits for events on behalf of one page."""

    def __init__(self, caller: Caller) -> None:
        self.caller = caller
        self._events: deque[bytes] = deque()
        self._has_ended = False
        self._woken = asyncio.Event()

    def hear(self, event: bytes | None) -> None:
        if event is not None:
            self._events.append(event)
            self._has_ended |= len(self._events) > MOST_BEHIND  # its page asks for everything when it is back
            self._woken.set()

    def end(self) -> None:
        self._has_ended = True
        self._woken.set()

    async def events(self) -> AsyncIterator[bytes]:
        while not self._has_ended:
            try:
                async with asyncio.timeout(ALIVE_SECONDS):
                    await self._woken.wait()
            except TimeoutError:
                yield ALIVE
                continue
            self._woken.clear()
            while self._events and not self._has_ended:
                yield self._events.popleft()


def _event(runs: Collection[str]) -> bytes:
    """Encode an event in the format of server-sent events."""
    return b"event: changed\r\ndata: " + msgspec.json.encode({"runs": sorted(runs)}) + b"\r\n\r\n"
