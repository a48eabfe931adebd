"""A client that hangs up is no failure of the server, and what is refused leaves nothing behind."""

import gc
import logging
import weakref
from typing import ClassVar

import msgspec
import pytest
from litestar import Litestar, Request, post
from litestar.params import JSONBody
from litestar.types import Message

from spmd_tx.coordinator.http.errors import EXCEPTION_HANDLERS


@post("/echo")
async def echo(request: Request) -> str:
    return (await request.body()).decode()


class Counted(Request):
    """A request that is known as long as it lives."""

    made = 0
    living: ClassVar = weakref.WeakSet[Request]()

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, **options)
        Counted.made += 1
        self.living.add(self)


class Pair(msgspec.Struct):
    left: int
    right: int


@post("/pair")
async def pair(data: JSONBody[Pair]) -> int:
    return data.left + data.right


async def send_half_a_body_and_leave(app: Litestar) -> list[Message]:
    return await post_to(app, "/echo", {"body": b"half", "more_body": True}, {"type": "http.disconnect"})


async def post_to(app: Litestar, path: str, *messages: Message) -> list[Message]:
    arriving = [{"type": "http.request"} | message for message in messages]
    answered: list[Message] = []

    async def receive() -> Message:
        return arriving.pop(0)

    async def send(message: Message) -> None:
        answered.append(message)

    headers = [(b"content-type", b"application/json"), (b"content-length", b"8")]
    address = {"server": ("127.0.0.1", 80), "client": ("127.0.0.1", 1), "scheme": "http", "root_path": ""}
    scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
    await app(scope | address | {"headers": headers, "http_version": "1.1", "app": app}, receive, send)
    return answered


async def test_a_client_that_leaves_is_not_logged_as_an_error(caplog):
    app = Litestar([echo], exception_handlers=EXCEPTION_HANDLERS, openapi_config=None, logging_config=None)
    with caplog.at_level(logging.WARNING):
        answered = await send_half_a_body_and_leave(app)
    assert answered[0]["status"] == 500  # nobody reads it
    # Of clients that earlier tests of this process left, some still look for their servers.
    assert [record for record in caplog.records if record.name.partition(".")[0] != "tinker"] == []


@pytest.mark.parametrize(
    "body, status",
    [
        (b'{"left": 1, "right": 2}', 201),
        (b'{"left": 1, "right": "two"}', 400),
        (b'{"left": null, "right": []}', 400),
        (b"[1, 2]", 400),
        (b'{"left": 1', 400),
        (b'{"left": "\xff"}', 400),
        (b"[" * 5000, 400),
    ],
)
async def test_a_body_is_freed_at_once_without_the_garbage_collector(body, status):
    app = Litestar(
        [pair],
        exception_handlers=EXCEPTION_HANDLERS,
        openapi_config=None,
        logging_config=None,
        request_class=Counted,
    )
    gc.disable()
    try:
        made, living = Counted.made, len(Counted.living)
        answered = await post_to(app, "/pair", {"body": body})
        assert answered[0]["status"] == status
        assert Counted.made > made
        assert len(Counted.living) == living
    finally:
        gc.enable()
