"""Bounds how long bodies of requests take to come, how slowly, and how much memory all of them hold."""

import asyncio
from typing import cast

from litestar.types import (
    ASGIApp,
    HTTPReceiveMessage,
    HTTPScope,
    Receive,
    Scope,
    Send,
    WebSocketReceiveMessage,
)

from spmd_tx.coordinator.http.authentication import HAS_BATCH, HAS_PROMPTS, IS_DROPPED, IS_READING
from spmd_tx.coordinator.http.body_room import BodyRoom, Place
from spmd_tx.coordinator.http.errors import MAX_BODY_BYTES
from spmd_tx.coordinator.http.services import Services
from spmd_tx.errors import BodyTooLarge, BodyTooSlow, Unavailable

SMALL_BYTES = 64 << 10  # of each body, that need no room: a sign of life is not held up by data
UNPACKED = 4  # a compressed body becomes so many times as large, or more
NOBODY = ""  # the owner of what has none


class BodyGuard:
    """Middleware; one for the whole application.

    A route asks for the body once the guard of all routes (authentication.py) has let the caller in. So
    nobody else takes room, and it is known whose the body is.
    """

    def __call__(self, app: ASGIApp) -> ASGIApp:
        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            headers = dict(scope["headers"])
            if b"content-length" not in headers and b"transfer-encoding" not in headers:
                await app(scope, receive, send)
                return
            body = _Body(cast(HTTPScope, scope), headers, receive)
            try:
                await app(scope, body.receive, send)
            finally:
                body.leave()

        return guarded


class _Body:
    """Of one request. What comes behind it, that the client hangs up, may take any time."""

    def __init__(self, scope: HTTPScope, headers: dict[bytes, bytes], receive: Receive) -> None:
        self._now = asyncio.get_running_loop().time
        self._scope = scope
        self._headers = headers
        self._receive = receive
        self._services: Services = scope["litestar_app"].state.services
        self._bounds = self._services.config.bounds
        self._most = MAX_BODY_BYTES  # bytes
        self._weight = 1
        self._room: BodyRoom | None = None
        self._place: Place | None = None
        self._began_at: float | None = None
        self._waited = 0.0  # seconds, for room: they are not the sender's
        self._received = 0  # bytes
        self._timeout: asyncio.Timeout | None = None  # while something is waited for
        self._must_give_way = False
        self._is_complete = False

    async def receive(self) -> HTTPReceiveMessage | WebSocketReceiveMessage:
        if self._is_complete:
            return await self._receive()
        now = self._now()
        if self._began_at is None:
            self._began_at = now
            self._begin()
        try:
            async with asyncio.timeout_at(self._deadline(now, self._began_at)) as self._timeout:
                message = await self._receive()
        except TimeoutError:
            raise self._too_slow() from None
        finally:
            self._timeout = None
        if message["type"] != "http.request":
            self._is_complete = True
            return message
        self._received += len(message["body"])
        if self._received > self._most:
            raise self._too_large()
        self._is_complete = not message["more_body"]
        if self._room is not None and self._place is not None:
            await self._take(self._room, self._place, len(message["body"]))
        return message

    def leave(self) -> None:
        """The request has been answered."""
        if self._room is not None and self._place is not None:
            self._room.leave(self._place)

    def _begin(self) -> None:
        """See in the headers how much it is, and find a room for it."""
        headers, opt = self._headers, self._scope["route_handler"].opt
        if IS_READING in opt:
            self._most = self._bounds.reading_body_bytes
        elif HAS_PROMPTS in opt:
            self._most = self._bounds.prompt_body_bytes
        elif HAS_BATCH not in opt:
            self._most = self._bounds.plain_body_bytes
        length = headers.get(b"content-length", b"")
        size = int(length) if length.isdigit() else self._most
        if size > self._most:
            raise self._too_large()
        if size <= SMALL_BYTES or IS_DROPPED in opt:
            return
        self._weight = 1 if headers.get(b"content-encoding", b"identity") == b"identity" else UNPACKED
        rooms, caller = self._services.body_rooms, self._scope.get("auth")
        self._room = rooms.reading if IS_READING in opt else rooms.working
        owner = NOBODY if caller is None else caller.owner
        self._place = self._room.place(owner, (size - SMALL_BYTES) * self._weight, self._give_way)

    def _deadline(self, now: float, began_at: float) -> float:
        """When the next piece must be here."""
        bounds = self._bounds
        began_at += self._waited
        deadline = min(now + bounds.body_piece_seconds, began_at + bounds.body_seconds)
        if self._place is None:
            return deadline
        in_time = max(bounds.body_grace_seconds, self._received / bounds.body_bytes_per_second)
        return min(deadline, began_at + in_time)  # later it would be so slow that it keeps room from others

    async def _take(self, room: BodyRoom, place: Place, piece: int) -> None:
        """Find room for what has come."""
        if self._must_give_way:
            raise _no_room()
        size = min(piece, self._received - SMALL_BYTES) * self._weight
        if size > 0 and not room.take_now(place, size):
            waits_since = self._now()
            try:
                async with asyncio.timeout(self._bounds.body_room_seconds) as self._timeout:
                    await room.take(place, size)
            except TimeoutError:
                raise _no_room() from None
            finally:
                self._timeout = None
            self._waited += self._now() - waits_since
        if self._is_complete:
            room.be_whole(place)

    def _give_way(self) -> None:
        self._must_give_way = True
        if self._timeout is not None:
            self._timeout.reschedule(self._now())

    def _too_slow(self) -> BodyTooSlow | Unavailable:
        if self._must_give_way:
            return _no_room()
        return BodyTooSlow(
            f"the body of this request did not arrive in time, {self._received} bytes did; send it again"
        )

    def _too_large(self) -> BodyTooLarge:
        what = f"the body is larger than {self._most >> 10} KiB"
        is_of_data = self._most == MAX_BODY_BYTES
        return BodyTooLarge(f"{what}; send fewer datums per request" if is_of_data else what)


def _no_room() -> Unavailable:
    return Unavailable("the server is reading too many large requests at once; send this one again")
