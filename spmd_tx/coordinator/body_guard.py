"""Bounds how long bodies of requests take to arrive, and how much memory all of them hold meanwhile."""

import asyncio
from collections.abc import Callable

from litestar.types import ASGIApp, HTTPReceiveMessage, Receive, Scope, Send, WebSocketReceiveMessage

from spmd_tx.errors import BodyTooSlow, Unavailable

PIECE_SECONDS = 30.0  # until the next piece
BODY_SECONDS = 300.0  # until the last one
MOST_BYTES = 1 << 30  # of the bodies of all requests that are being read or handled


class BodyGuard:
    """Middleware; one for the whole application."""

    def __init__(self) -> None:
        self.held = 0  # bytes

    def __call__(self, app: ASGIApp) -> ASGIApp:
        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            body = _Body(self._hold, receive)
            try:
                await app(scope, body.receive, send)
            finally:
                self.held -= body.size

        return guarded

    def _hold(self, size: int) -> None:
        if self.held + size > MOST_BYTES:
            raise Unavailable("the server is reading too many large requests at once; send this one again")
        self.held += size


class _Body:
    """Of one request. What comes behind it, that the client hangs up, may take any time."""

    def __init__(self, hold: Callable[[int], None], receive: Receive) -> None:
        self.size = 0
        self._hold = hold
        self._deadline = asyncio.get_running_loop().time() + BODY_SECONDS
        self._receive = receive
        self._is_complete = False

    async def receive(self) -> HTTPReceiveMessage | WebSocketReceiveMessage:
        if self._is_complete:
            return await self._receive()
        deadline = min(self._deadline, asyncio.get_running_loop().time() + PIECE_SECONDS)
        try:
            async with asyncio.timeout_at(deadline):
                message = await self._receive()
        except TimeoutError:
            raise BodyTooSlow(
                f"the body of this request did not arrive in time, {self.size} bytes did; send it again"
            ) from None
        if message["type"] != "http.request":
            self._is_complete = True
            return message
        piece = len(message["body"])
        self._hold(piece)
        self.size += piece
        self._is_complete = not message["more_body"]
        return message
