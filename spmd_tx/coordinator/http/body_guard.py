"""Limits request bodies: their size, how slowly they may arrive, and how much memory all of them hold."""

import asyncio
import math
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
from litestar.utils.scope.state import CONNECTION_STATE_KEY

from spmd_tx.coordinator.http.authentication import BATCH, DROPS, PROMPTS, READS, STREAMED, has_mark
from spmd_tx.coordinator.http.errors import MAX_BODY_BYTES
from spmd_tx.coordinator.http.security.body_room import BodyRoom, BodyShare
from spmd_tx.coordinator.http.services import Services
from spmd_tx.errors import BodyTooLarge, BodyTooSlow, Unavailable

SMALL_BYTES = 64 << 10  # of each body need no room, so that data does not delay heartbeats
UNPACKED = 4  # factor by which a compressed body grows, at least
NOBODY = ""  # the owner of a body without a caller


def guard_bodies(app: ASGIApp) -> ASGIApp:
    """Guard the bodies of all requests. A middleware.

    A route reads the body after authentication, so only known callers take room.
    """

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
            # It holds the body, and is part of a cycle: both would stay until the next collection of
            # garbage, which is rare.
            scope["state"].pop(CONNECTION_STATE_KEY, None)

    return guarded


class _Body:
    """Receives the body of one request. Later messages, such as a disconnect, have no time limit."""

    def __init__(self, scope: HTTPScope, headers: dict[bytes, bytes], receive: Receive) -> None:
        self._now = asyncio.get_running_loop().time
        self._scope = scope
        self._headers = headers
        self._receive = receive
        self._services: Services = scope["litestar_app"].state.services
        self._bounds = self._services.config.bounds
        self._most: float = MAX_BODY_BYTES  # bytes
        self._is_streamed = False
        self._weight = 1
        self._room: BodyRoom | None = None
        self._place: BodyShare | None = None
        self._began_at: float | None = None
        self._waited = 0.0  # seconds, for room: they do not count against the sender
        self._received = 0  # bytes
        self._timeout: asyncio.Timeout | None = None  # while it waits
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
        """Give the room back: the request has been answered."""
        if self._room is not None and self._place is not None:
            self._room.leave(self._place)

    def _begin(self) -> None:
        """Read from the headers how large the body may be, and choose its room."""
        headers, route = self._headers, self._scope["route_handler"]
        if has_mark(route, STREAMED):
            self._is_streamed, self._most = True, math.inf
            return
        if has_mark(route, PROMPTS):
            self._most = self._bounds.prompt_body_bytes
            if self._services.bases.take_images:
                self._most = max(self._most, self._bounds.image_prompt_body_bytes)
        elif has_mark(route, READS):
            self._most = self._bounds.reading_body_bytes
        elif not has_mark(route, BATCH):
            self._most = self._bounds.plain_body_bytes
        length = headers.get(b"content-length", b"")
        size = int(length) if length.isdigit() else int(self._most)
        if size > self._most:
            raise self._too_large()
        if size <= SMALL_BYTES or has_mark(route, DROPS):
            return
        self._weight = 1 if headers.get(b"content-encoding", b"identity") == b"identity" else UNPACKED
        rooms, caller = self._services.body_rooms, self._scope.get("auth")
        self._room = rooms.reading if has_mark(route, READS) else rooms.working
        owner = NOBODY if caller is None else caller.owner
        self._place = self._room.place(owner, (size - SMALL_BYTES) * self._weight, self._give_way)

    def _deadline(self, now: float, began_at: float) -> float:
        """Return when the next part of the body must have arrived."""
        bounds = self._bounds
        began_at += self._waited
        deadline = now + bounds.body_piece_seconds
        if not self._is_streamed:
            deadline = min(deadline, began_at + bounds.body_seconds)
        if self._place is None and not self._is_streamed:
            return deadline
        in_time = max(bounds.body_grace_seconds, self._received / bounds.body_bytes_per_second)
        return min(deadline, began_at + in_time)  # a slower body would keep room from others

    async def _take(self, room: BodyRoom, place: BodyShare, piece: int) -> None:
        """Take room for the part that has arrived."""
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
        what = f"the body is larger than {int(self._most) >> 10} KiB"
        is_of_data = self._most == MAX_BODY_BYTES
        return BodyTooLarge(f"{what}; send fewer datums per request" if is_of_data else what)


def _no_room() -> Unavailable:
    return Unavailable("the server is reading too many large requests at once; send this one again")
