"""What clients can do wrong below the level of requests, on real sockets: nobody else notices."""

import asyncio
import socket
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace

import httpx
import msgspec
import pytest
import zstandard

from spmd_tx.bounds import Bounds
from spmd_tx.coordinator.http import body_guard, uvicorn_server
from spmd_tx.coordinator.http.connections import Connections
from spmd_tx.coordinator.http.uvicorn_server import HttpServer
from spmd_tx.coordinator.tenancy import keys

SECONDS = 30  # until a test gives up
DEEP = 200_000

sqlite_only = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)
pytestmark = sqlite_only


@pytest.fixture
def connections():
    return Connections(most=50, most_per_address=40)


@pytest.fixture
async def port(app, connections):
    """Of a real HTTP server."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(128)
        server = HttpServer(app, listening, connections)
        running = asyncio.create_task(server.run())
        yield listening.getsockname()[1]
        server.stop()
        await running


@pytest.fixture
async def client(port):
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}/api/v1/", timeout=SECONDS) as client:
        yield client


@pytest.fixture
def bound(app, services):
    """Change bounds of the running server."""

    def bound(**bounds):
        config = msgspec.structs.replace(services.config, bounds=Bounds(**bounds))
        app.state.services = replace(services, config=config)

    return bound


@asynccontextmanager
async def connected(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer_of(reader) -> bytes:
    """All that the server sends until it hangs up. It resets the connection of a client that still sends."""
    answer = b""
    async with asyncio.timeout(SECONDS):
        with suppress(ConnectionResetError):
            while piece := await reader.read(1 << 16):
                answer += piece
    return answer


def head(path: str, **headers: object) -> bytes:
    lines = [f"POST /api/v1/{path} HTTP/1.1", "host: server", "content-type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


async def is_well(client) -> bool:
    return (await client.post("create_session", json={})).status_code == 200


def nested(field: str, **others: str) -> bytes:
    more = "".join(f'"{name}":{value},' for name, value in others.items())
    return f'{{{more}"{field}":{"[" * DEEP}{"]" * DEEP}}}'.encode()


@pytest.mark.parametrize(
    "path",
    "create_session create_model optim_step save_weights asample sessions/search retrieve_future".split(),
)
@pytest.mark.parametrize("field", ["user_metadata", "unknown"])
async def test_json_without_a_bottom_is_refused(client, path, field):
    response = await client.post(path, content=nested(field), headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert await is_well(client)


@pytest.mark.parametrize(
    "metadata, complaint",
    [
        ({"a": {"b": [[[[[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]]]]}}, "nested more than 20"),
        ({"a": "x" * (64 << 10)}, "at most 65536"),
    ],
    ids=["deep", "large"],
)
async def test_metadata_is_bounded(client, model_id, metadata, complaint):
    for path, body in {
        "create_session": {},
        "save_weights": {"model_id": model_id, "seq_id": 1, "path": "a"},
    }.items():
        response = await client.post(path, json=body | {"user_metadata": metadata})
        assert response.status_code == 400
        assert complaint in response.json()["detail"]


@pytest.mark.parametrize("field", ["display_name", "project_id", "sdk_version"])
async def test_labels_are_bounded(client, field):
    assert (await client.post("create_session", json={field: "ö" * 1000})).status_code == 200
    for value in ("x" * 1001, "a\\u0000b", "\\ud800"):
        body = f'{{"{field}": "{value}"}}'
        headers = {"content-type": "application/json"}
        assert (await client.post("create_session", content=body, headers=headers)).status_code == 400


NAMES = [
    "..",
    ".",
    "%2e%2e",
    "..%2f..%2fetc",
    "%00",
    "a%00b",
    "%0a",
    "%1b[31m",
    "%ff%fe",
    "%e2%80%ae",
    "a\\b",
]


@pytest.mark.parametrize("name", [*NAMES, "x" * 300, "x" * 20_000, "%F0%9F%92%A9" * 100])
async def test_tricks_in_addresses_find_nothing(port, client, model_id, name):
    """Sent as they are: httpx would tidy them up."""
    for path in (
        f"training_runs/{model_id}/checkpoints/weights/{name}",
        f"training_runs/{name}/checkpoints/weights/a",
        f"training_runs/{model_id}/checkpoints/{name}/a/archive",
        f"sessions/{name}/trace_export",
        f"downloads/files/{model_id}/weights/a/v/{name}",
    ):
        for method in ("GET", "DELETE"):
            async with connected(port) as (reader, writer):
                writer.write(
                    f"{method} /api/v1/{path} HTTP/1.1\r\nhost: s\r\nconnection: close\r\n\r\n".encode()
                )
                status = int((await answer_of(reader)).split()[1])
            assert status in (400, 403, 404, 405), path
    assert await is_well(client)


@pytest.mark.parametrize(
    "name", ["..", "a/b", "a\\b", ".hidden", "a\nb", "a\x1b[31mb", "\u202e", "", "x" * 300]
)
async def test_tricks_in_names_of_checkpoints_are_refused(client, model_id, name):
    for path in (name, f"tinker://{model_id}/weights/{name}", f"tinker://{name}/weights/a"):
        response = await client.post("weights_info", json={"tinker_path": path})
        assert response.status_code in (400, 404)


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


LARGE = {"display_name": "x", "unknown": "x" * 100_000}


async def test_a_large_body_waits_until_there_is_room_and_small_ones_do_not(client, no_room):
    waiting = asyncio.create_task(client.post("create_session", json=LARGE))
    assert await is_well(client)
    assert (await client.post("create_session", json={"display_name": "x"})).status_code == 200
    assert not waiting.done()
    no_room()
    assert (await waiting).status_code == 200


async def test_a_large_body_that_finds_no_room_for_long_is_refused(client, no_room, bound):
    bound(body_room_seconds=0.01)
    assert (await client.post("create_session", json=LARGE)).status_code == 503
    no_room()
    assert (await client.post("create_session", json=LARGE)).status_code == 200


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


@pytest.mark.parametrize("key", ["reader", "bob", None])
@pytest.mark.parametrize("path", ["telemetry", "retrieve_futures", "create_session"])
@pytest.mark.parametrize(
    "announced", [{"content_length": 64 << 20}, {"transfer_encoding": "chunked"}], ids=["long", "chunked"]
)
async def test_slow_senders_leave_room_for_others(port, client, services, keys_of, key, path, announced):
    """Three of them, who have announced all the room there is, and send hardly anything."""
    headers = {} if key is None else {"x_api_key": keys_of[key]}
    piece = b"20000\r\n" + b" " * 0x20000 + b"\r\n" if "transfer_encoding" in announced else b" " * 0x20000
    async with AsyncExitStack() as stack:
        for _ in range(3):
            _, writer = await stack.enter_async_context(connected(port))
            writer.write(head(path, **headers, **announced) + piece)
        alice = await client.post("create_session", json=LARGE, headers={"x-api-key": keys_of["alice"]})
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


async def test_a_body_in_pieces_of_unknown_length_is_bounded(client):
    async def pieces():
        for _ in range(70):
            yield b" " * (1 << 20)

    response = await client.post(
        "create_session", content=pieces(), headers={"content-type": "application/json"}
    )
    assert response.status_code == 413


async def test_telemetry_is_taken_and_dropped(client, services):
    events = [{"event": "GENERIC_EVENT", "event_data": "x" * 1000}] * 900
    for body in ({"events": events}, {"anything": None}):
        assert (await client.post("telemetry", json=body)).json() == {"status": "accepted"}
    assert (await client.post("telemetry", content=b"no json")).status_code == 200


@pytest.mark.parametrize("path", ["telemetry", "retrieve_futures", "sessions/search"])
async def test_what_changes_nothing_is_short(client, path):
    response = await client.post(path, content=b" " * ((1 << 20) + 1))
    assert response.status_code == 413
    assert response.json()["detail"] == "the body is larger than 1024 KiB"


def frame(size: int, **parameters: object) -> bytes:
    return zstandard.ZstdCompressor(**parameters).compress(bytes(size))


def with_size(announced: int) -> bytes:
    """A frame of 1000 bytes whose header says something else, in two bytes that count from 256."""
    body = bytearray(frame(1000))
    body[5:7] = (announced - 256).to_bytes(2, "little")
    return bytes(body)


@pytest.mark.parametrize(
    "body, complaint",
    [
        (with_size(999), ""),
        (with_size(60_000), ""),
        (frame(1000) * 2, "more than one frame"),
        (frame(1000) + b"what is this", "no zstd frame"),
        (frame(200 << 20), "more than 128 MiB"),
        (frame(40 << 20) * 4, "more than 128 MiB"),
        (frame(200 << 20, write_content_size=False), "more than 128 MiB"),
        (b"\x28\xb5\x2f\xfd\x00\xf8" + bytes(20), "no zstd frame"),  # a window of 2 TiB
        (frame(0) * 100_000, None),  # a request for no model
    ],
    ids=["less", "more", "two", "tail", "bomb", "frames", "unannounced", "window", "empty frames"],
)
async def test_compressed_bodies_that_lie_are_refused(client, body, complaint):
    headers = {"content-type": "application/x-protobuf", "content-encoding": "zstd"}
    response = await client.post("forward_backward", content=body, headers=headers)
    assert response.status_code == (400 if complaint is not None else 404)
    assert (complaint or "") in response.json()["detail"]
    assert await is_well(client)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_openai_bodies_without_a_bottom_are_refused_in_its_words(client, path):
    headers = {"content-type": "application/json"}
    url = str(client.base_url).replace("/api/v1/", f"/oai/api/v1/{path}")
    response = await client.post(url, content=nested("messages"), headers=headers)
    assert response.status_code == 400
    assert "nested too deeply" in response.text
