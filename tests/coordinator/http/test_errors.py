"""A client that hangs up while it still sends a body is no failure of the server."""

import logging

from litestar import Litestar, Request, post
from litestar.types import Message

from spmd_tx.coordinator.http.errors import EXCEPTION_HANDLERS


@post("/echo")
async def echo(request: Request) -> str:
    return (await request.body()).decode()


async def send_half_a_body_and_leave(app: Litestar) -> list[Message]:
    arriving = [{"type": "http.request", "body": b"half", "more_body": True}, {"type": "http.disconnect"}]
    answered: list[Message] = []

    async def receive() -> Message:
        return arriving.pop(0)

    async def send(message: Message) -> None:
        answered.append(message)

    headers = [(b"content-type", b"application/json"), (b"content-length", b"8")]
    address = {"server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1), "scheme": "http", "root_path": ""}
    scope = {"type": "http", "method": "POST", "path": "/echo", "raw_path": b"/echo", "query_string": b""}
    await app(scope | address | {"headers": headers, "http_version": "1.1", "app": app}, receive, send)
    return answered


async def test_a_client_that_leaves_is_not_logged_as_an_error(caplog):
    app = Litestar([echo], exception_handlers=EXCEPTION_HANDLERS, openapi_config=None, logging_config=None)
    with caplog.at_level(logging.WARNING):
        answered = await send_half_a_body_and_leave(app)
    assert answered[0]["status"] == 500  # nobody reads it
    # Of clients that earlier tests of this process left, some still look for their servers.
    assert [record for record in caplog.records if record.name.partition(".")[0] != "tinker"] == []
