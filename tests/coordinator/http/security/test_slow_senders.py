"""Clients that are slow, silent, many or untrue, on real sockets: nobody else notices."""

import asyncio
from contextlib import AsyncExitStack

import httpx
import pytest

from spmd_tx.coordinator.http import body_guard, uvicorn_server
from spmd_tx.coordinator.tenancy import keys
from tests.coordinator.conftest import BASE_MODEL
from tests.coordinator.http.real_server import answer_of, connected, head, is_well, sqlite_only
from tests.coordinator.http.real_server import bound as bound  # a fixture
from tests.coordinator.http.real_server import client as client  # a fixture
from tests.coordinator.http.real_server import connections as connections  # a fixture
from tests.coordinator.http.real_server import port as port  # a fixture

pytestmark = sqlite_only


@pytest.mark.parametrize("flood", [b"GET /" + b"x" * 100_000, b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000])
async def test_headers_without_end_are_refused(port, client, flood):
    async with connected(port) as (reader, writer):
        writer.write(flood)
        answer = await answer_of(reader)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"64 KiB" in answer
    assert await is_well(client)


@pytest.mark.parametrize("start", [b"", b"POST /api", b"GET / HTTP/1.1\r\nhost: a\r\n"])
async def test_a_connection_that_never_asks_is_closed(port, client, monkeypatch, start):
    monkeypatch.setattr(uvicorn_server, "HEADER_SECONDS", 0.1)
    async with connected(port) as (reader, writer):
        writer.write(start)
        assert await answer_of(reader) == b""
    assert await is_well(client)


async def test_a_second_request_of_a_connection_must_come_whole_too(port, monkeypatch):
    monkeypatch.setattr(uvicorn_server, "HEADER_SECONDS", 0.5)
    async with connected(port) as (reader, writer):
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\nGET /heal")
        assert (await answer_of(reader)).startswith(b"HTTP/1.1 200")


async def test_connections_that_ask_nothing_make_room_for_those_that_do(port, client, connections):
    async with AsyncExitStack() as stack:
        half_open = [await stack.enter_async_context(connected(port)) for _ in range(60)]
        for _, writer in half_open:
            writer.write(b"POST /api/v1/create_session HTTP/1.1\r\nhost: loc")
        assert await is_well(client)
        assert connections.count == 40
        assert await answer_of(half_open[0][0]) == b""


async def test_too_many_connections_that_are_at_work_are_refused(port, connections, bound):
    async with AsyncExitStack() as stack:
        for _ in range(40):
            reader, writer = await stack.enter_async_context(connected(port))
            writer.write(head("create_session", content_length=2, expect="100-continue"))
            assert b"100 Continue" in await reader.readline()
        reader, _ = await stack.enter_async_context(connected(port))
        answer = await answer_of(reader)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"too many connections" in answer
        assert connections.count == 40
    while connections.count:
        await asyncio.sleep(0.01)


async def test_noise_after_an_answer_keeps_no_connection(port, monkeypatch):
    monkeypatch.setattr(uvicorn_server, "HEADER_SECONDS", 0.5)
    async with connected(port) as (reader, writer):
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: a\r\n\r\n")
        await reader.readuntil(b"}")
        writer.write(b"\r\n")
        assert await answer_of(reader) == b""


async def test_the_rest_of_a_body_that_nobody_wants_must_come_soon(port, monkeypatch):
    monkeypatch.setattr(uvicorn_server, "REST_SECONDS", 0.1)
    async with connected(port) as (reader, writer):
        writer.write(head("nothing_here", content_length=1000) + b"{")
        answered = asyncio.create_task(answer_of(reader))
        while not answered.done():
            writer.write(b" ")
            await asyncio.sleep(0.01)
        assert answered.result().startswith(b"HTTP/1.1 404")


@pytest.mark.parametrize("hosts", ["", "host: localhost\r\nhost: localhost\r\n"], ids=["none", "two"])
async def test_a_request_has_one_host(port, hosts):
    async with connected(port) as (reader, writer):
        writer.write(f"GET /healthz HTTP/1.1\r\n{hosts}\r\n".encode())
        answer = await answer_of(reader)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"one header Host" in answer


async def test_no_answer_is_to_be_taken_for_what_it_does_not_say_it_is(port, client):
    for path in ("healthz", "nothing_here"):
        assert (await client.get(path)).headers["x-content-type-options"] == "nosniff"
    async with connected(port) as (reader, writer):
        writer.write(b"what is this\r\n\r\n")
        assert b"\r\nx-content-type-options: nosniff\r\n" in (await answer_of(reader)).lower()


async def test_bodies_that_stall_are_given_up_and_hold_up_nobody(port, client, bound):
    async def stall():
        async with connected(port) as (reader, writer):
            writer.write(head("create_session", content_length=1000) + b'{"tags": [')
            return await answer_of(reader)

    bound(body_piece_seconds=1.0)
    stalled = [asyncio.create_task(stall()) for _ in range(20)]
    assert await is_well(client)
    for answer in await asyncio.gather(*stalled):
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"did not arrive in time" in answer


@pytest.mark.parametrize(
    "bounds",
    [{"body_seconds": 0.5}, {"body_grace_seconds": 0.5, "body_bytes_per_second": 1 << 20}],
    ids=["long", "slow"],
)
async def test_bodies_that_trickle_are_given_up_too(port, bound, bounds):
    bound(**bounds)
    async with connected(port) as (reader, writer):
        writer.write(head("create_session", content_length=1_000_000))
        answered = asyncio.create_task(answer_of(reader))
        while not answered.done():
            writer.write(b" ")
            await asyncio.sleep(0.02)
        assert answered.result().startswith(b"HTTP/1.1 408")


@pytest.fixture
async def no_room(services):
    """What is there is taken, by those who have sent it all."""
    room = services.body_rooms.working
    places = [room.place(owner, room.capacity // 2, lambda: None) for owner in ("two", "others")]
    for place in places:
        await room.take(place, room.capacity // 2)
        room.be_whole(place)
    return lambda: [room.leave(place) for place in places]


LARGE = b'{"display_name": "x"' + b" " * 100_000 + b"}"
JSON = {"content-type": "application/json"}


async def test_a_large_body_waits_until_there_is_room_and_small_ones_do_not(client, no_room):
    waiting = asyncio.create_task(client.post("create_session", content=LARGE, headers=JSON))
    assert await is_well(client)
    assert (await client.post("create_session", json={"display_name": "x"})).status_code == 200
    assert not waiting.done()
    no_room()
    assert (await waiting).status_code == 200


async def test_a_large_body_that_finds_no_room_for_long_is_refused(client, no_room, bound):
    bound(body_room_seconds=0.01)
    assert (await client.post("create_session", content=LARGE, headers=JSON)).status_code == 503
    no_room()
    assert (await client.post("create_session", content=LARGE, headers=JSON)).status_code == 200


async def test_room_is_given_back_when_the_sender_leaves(port, client, services):
    room = services.body_rooms.working
    async with connected(port) as (_, writer):
        writer.write(head("create_session", content_length=100_000) + b" " * 90_000)
        while room.capacity - room.free != 90_000 - body_guard.SMALL_BYTES:
            await asyncio.sleep(0.01)
    while room.free != room.capacity:
        await asyncio.sleep(0.01)
    assert await is_well(client)


@pytest.fixture
async def keys_of(services):
    """A key of each."""

    async def make(owner, role="user"):
        async with services.database.transaction() as db:
            token, _ = await keys.create(db, keys.NewKeyOptions(owner, role))
        await services.keyring.look()
        return token

    return {"alice": await make("alice"), "bob": await make("bob"), "reader": await make("bob", "read-only")}


LONG, CHUNKED = {"content_length": 64 << 20}, {"transfer_encoding": "chunked"}
ANNOUNCED = [  # each with each of the others once
    ("reader", "telemetry", LONG),
    ("reader", "retrieve_futures", CHUNKED),
    ("reader", "create_session", LONG),
    ("bob", "telemetry", CHUNKED),
    ("bob", "retrieve_futures", LONG),
    ("bob", "create_session", CHUNKED),
    (None, "telemetry", LONG),
    (None, "retrieve_futures", CHUNKED),
    (None, "create_session", LONG),
]
OTHERS = [(key, path, CHUNKED if announced is LONG else LONG) for key, path, announced in ANNOUNCED]


@pytest.mark.parametrize(
    ("key", "path", "announced"),
    [*ANNOUNCED, *(pytest.param(*each, marks=pytest.mark.slow) for each in OTHERS)],
)
async def test_slow_senders_leave_room_for_others(port, client, services, keys_of, key, path, announced):
    """Three of them, who have announced all the room there is, and send hardly anything."""
    headers = {} if key is None else {"x_api_key": keys_of[key]}
    piece = b"20000\r\n" + b" " * 0x20000 + b"\r\n" if "transfer_encoding" in announced else b" " * 0x20000
    async with AsyncExitStack() as stack:
        for _ in range(3):
            _, writer = await stack.enter_async_context(connected(port))
            writer.write(head(path, **headers, **announced) + piece)
        alice = await client.post(
            "create_session", content=LARGE, headers=JSON | {"x-api-key": keys_of["alice"]}
        )
        assert alice.status_code == 200
        room = services.body_rooms.working
        assert room.capacity - room.free <= 3 * 0x20000
        if key != "bob" or path != "create_session":
            assert room.free == room.capacity


async def test_a_length_that_is_not_true_disturbs_only_its_sender(port, client):
    for request in (
        head("create_session", content_length=2) + b"{}" + b'{"what": "is this"}',
        head("create_session", content_length=-1) + b"{}",
        head("create_session", content_length="2, 3") + b"{}",
        head("create_session", content_length=2, Content_Length=3) + b"{}",
        head("create_session", content_length=2, transfer_encoding="chunked") + b"zz\r\n",
    ):
        async with connected(port) as (reader, writer):
            writer.write(request)
            assert b"HTTP/1.1 400" in await answer_of(reader)
    assert await is_well(client)


async def test_an_uploaded_file_may_take_long_but_not_stall_and_what_came_is_kept(port, client, bound):
    body = {"base_model": BASE_MODEL, "lora_config": {"rank": 8}}
    upload = (await client.post("external_weights_upload_start", json=body)).json()
    url = httpx.URL(upload["urls"]["adapter_config.json"])
    start = f"PUT {url.raw_path.decode()} HTTP/1.1\r\nhost: server\r\ncontent-length: 4\r\n\r\n{{".encode()
    bound(body_seconds=0.05)
    async with connected(port) as (reader, writer):
        writer.write(start)
        await asyncio.sleep(0.2)
        writer.write(b"} \n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    bound(body_piece_seconds=0.05)
    async with connected(port) as (reader, writer):
        writer.write(start)
        assert (await answer_of(reader)).startswith(b"HTTP/1.1 408")
    asked = await client.put(url, headers={"Content-Range": "bytes */4"})
    assert asked.headers["range"] == "bytes=0-0"
