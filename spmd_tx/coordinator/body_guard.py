"""Bounds how long bodies of requests take to arrive, and how much memory all of them hold meanwhile."""

import asyncio

from litestar.types import ASGIApp, HTTPReceiveMessage, Receive, Scope, Send, WebSocketReceiveMessage

from spmd_tx.coordinator.room import Room
from spmd_tx.errors import BodyTooSlow, Unavailable

PIECE_SECONDS = 30.0  # until the next piece
BODY_SECONDS = 300.0  # until the last one
ROOM_SECONDS = 60.0  # until there is room for a body
MOST_BYTES = 192 << 20  # of the large bodies of all requests that are being read or handled
SMALL_BYTES = 64 << 10  # bodies that need not wait: a sign of life is not held up by data
UNKNOWN_BYTES = 64 << 20  # of a body that comes in pieces: the largest there may be
UNPACKED = 4  # a compressed body becomes so many times as large, or more


class BodyGuard:
    """Middleware; one for the whole application.

    A large body is not read before there is room for all of it: until then its client cannot send it.
    """

    def __init__(self) -> None:
        self._room = Room(MOST_BYTES)

    @property
    def held(self) -> int:
        """Bytes."""
        return MOST_BYTES - self._room.free

    def __call__(self, app: ASGIApp) -> ASGIApp:
        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            size = _announced(scope)
            if size <= SMALL_BYTES:
                await app(scope, _Body(receive).receive, send)
                return
            body = _Body(receive, self._room, size)
            try:
                await app(scope, body.receive, send)
            finally:
                self._room.give_back(body.held)

        return guarded


def _announced(scope: Scope) -> int:
    """How much memory the body of a request will take, as far as its headers tell."""
    headers = dict(scope["headers"])
    length = headers.get(b"content-length", b"")
    if not length.isdigit():
        return UNKNOWN_BYTES if b"transfer-encoding" in headers else 0
    is_packed = headers.get(b"content-encoding", b"identity") != b"identity"
    return int(length) * (UNPACKED if is_packed else 1)


class _Body:
    """Of one request. What comes behind it, that the client hangs up, may take any time."""

    def __init__(self, receive: Receive, room: Room | None = None, size: int = 0) -> None:
        """The first piece waits for ``size`` bytes of the ``room``."""
        self.held = 0  # bytes of the room
        self._room = room
        self._size = size
        self._received = 0
        self._deadline: float | None = None
        self._receive = receive
        self._is_complete = False

    async def _begin(self) -> float:
        """Wait for room; when the body must be there."""
        if self._room is not None:
            try:
                async with asyncio.timeout(ROOM_SECONDS):
                    self.held = await self._room.take(self._size)
            except TimeoutError:
                raise Unavailable(
                    "the server is reading too many large requests at once; send this one again"
                ) from None
        return asyncio.get_running_loop().time() + BODY_SECONDS

    async def receive(self) -> HTTPReceiveMessage | WebSocketReceiveMessage:
        if self._is_complete:
            return await self._receive()
        if self._deadline is None:
            self._deadline = await self._begin()
        deadline = min(self._deadline, asyncio.get_running_loop().time() + PIECE_SECONDS)
        try:
            async with asyncio.timeout_at(deadline):
                message = await self._receive()
        except TimeoutError:
            raise BodyTooSlow(
                f"the body of this request did not arrive in time, {self._received} bytes did; send it again"
            ) from None
        if message["type"] != "http.request":
            self._is_complete = True
            return message
        self._received += len(message["body"])
        self._is_complete = not message["more_body"]
        return message
