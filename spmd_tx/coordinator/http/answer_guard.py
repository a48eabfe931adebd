"""Guards costly answers: one at a time for each owner, sent in pieces, to clients that read them."""

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, cast

from litestar import get
from litestar.connection import ASGIConnection
from litestar.handlers import BaseRouteHandler
from litestar.types import ASGIApp, HTTPResponseBodyEvent, Message, Receive, Scope, Send

from spmd_tx.coordinator.http.authentication import UNMETERED
from spmd_tx.coordinator.http.security.turns import Turn
from spmd_tx.coordinator.http.services import Services

TURN = "spmd_tx_turn"  # its place in the scope
PIECE_BYTES = 64 << 10
TURN_SECONDS = 5.0  # for which the owner's next answer waits until one is read


async def in_turn(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
    """Guard routes with costly answers, and without bodies: wait for the owner's turn.

    Raises TooManyRequests.
    """
    await take_turn(connection, "pages")


async def take_turn(
    connection: ASGIConnection[Any, Any, Any, Any], what: Literal["pages", "changes"]
) -> None:
    """Wait for the owner's turn, in a route whose body has arrived: others must not wait for that.

    What reads and what writes wait in different lines, so that a slow page delays no client at work. Raises
    TooManyRequests.
    """
    services: Services = connection.app.state.services
    turn = await services.turns.take(connection.scope["auth"].owner, what)
    cast(dict[str, Any], connection.scope)[TURN] = turn


# The pages of the console ask such routes again and again.
polled = partial(get, opt=UNMETERED, guards=[in_turn])


def guard_answers(app: ASGIApp) -> ASGIApp:
    """End the turns that ``in_turn`` has begun. A middleware."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        state = cast(dict[str, Any], scope)

        async def send_in_turn(message: Message) -> None:
            turn: Turn | None = state.get(TURN)
            if turn is None or message["type"] != "http.response.body":
                await send(message)
                return
            turn.made()
            bounds = state["litestar_app"].state.services.config.bounds
            waiting = asyncio.get_running_loop().call_later(TURN_SECONDS, turn.sent)
            try:
                async with asyncio.timeout(bounds.answer_send_seconds):
                    for piece in _pieces(message):
                        await send(piece)
            except TimeoutError:
                pass  # its client does not read: the server closes a connection whose answer is not complete
            finally:
                waiting.cancel()

        try:
            await app(scope, receive, send_in_turn)
        finally:
            if TURN in state:
                state[TURN].sent()

    return guarded


def _pieces(message: HTTPResponseBodyEvent) -> Iterator[HTTPResponseBodyEvent]:
    body, has_more = memoryview(message["body"]), message.get("more_body", False)
    for begin in range(0, max(1, len(body)), PIECE_BYTES):
        end = begin + PIECE_BYTES
        is_last = end >= len(body) and not has_more
        yield {"type": "http.response.body", "body": bytes(body[begin:end]), "more_body": not is_last}
