"""Costly answers, on real sockets."""

import asyncio
import gc
import socket
from contextlib import AsyncExitStack

import pytest

from spmd_tx.coordinator.http import answer_guard
from spmd_tx.coordinator.storage.tables import ModelRow, SessionRow
from tests.coordinator.http.real_server import SECONDS, answer_of, connected, head, sqlite_only
from tests.coordinator.http.real_server import bound as bound  # a fixture
from tests.coordinator.http.real_server import client as client  # a fixture
from tests.coordinator.http.real_server import connections as connections  # a fixture
from tests.coordinator.http.real_server import port as port  # a fixture

pytestmark = sqlite_only


@pytest.fixture
def fill(services):
    async def fill(runs, size=60_000):
        async with services.database.transaction() as db:
            db.add(SessionRow(id="s", created_at=0.0, tags=[], owner="local"))
            for number in range(runs):
                adapter = {
                    "rank": 8,
                    "alpha": 8.0,
                    "train_attn": True,
                    "train_mlp": True,
                    "train_unembed": True,
                }
                about = {"session_id": "s", "base_model": "x", "user_metadata": {"notes": "x" * size}}
                db.add(ModelRow(id=f"s:train:{number}", created_at=float(number), **adapter, **about))

    return fill


async def test_a_large_answer_arrives_whole_and_the_next_one_follows(client, fill):
    await fill(5)
    for _ in range(2):
        runs = (await client.get("training_runs")).json()["training_runs"]
        assert [len(run["user_metadata"]["notes"]) for run in runs] == [60_000] * 5


async def test_a_client_that_does_not_read_is_dropped_and_its_owner_goes_on(client, port, bound, fill):
    await fill(100)
    bound(answer_send_seconds=0.05)
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # else the system takes all of it
        slow.connect(("127.0.0.1", port))
        slow.sendall(b"GET /api/v1/training_runs?limit=100 HTTP/1.1\r\nhost: server\r\n\r\n")
        answer = await asyncio.wait_for(client.get("training_runs?limit=1"), SECONDS)
        assert answer.status_code == 200
        slow.setblocking(False)
        received, loop = 0, asyncio.get_running_loop()
        async with asyncio.timeout(SECONDS):
            while piece := await loop.sock_recv(slow, 1 << 16):
                received += len(piece)
        assert 0 < received < 100 * 60_000


async def test_an_owner_waits_some_seconds_only_for_what_is_not_read(client, port, fill, monkeypatch):
    monkeypatch.setattr(answer_guard, "TURN_SECONDS", 0.05)
    await fill(100)
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", port))
        slow.sendall(b"GET /api/v1/training_runs?limit=100 HTTP/1.1\r\nhost: server\r\n\r\n")
        answer = await asyncio.wait_for(client.get("training_runs?limit=1"), SECONDS)
        assert answer.status_code == 200


async def test_bodies_that_do_not_arrive_hold_nobody_up(client, port, app):
    most = app.state.services.config.bounds.answers_at_once
    async with AsyncExitStack() as stack:
        for path in ["sessions/search", "checkpoints/search", "training_runs/s:train:0/metrics"] * most:
            _, writer = await stack.enter_async_context(connected(port))
            writer.write(head(path, content_length=1000))
            await writer.drain()
        await asyncio.sleep(0.1)
        answer = await asyncio.wait_for(client.get("training_runs"), SECONDS)
        assert answer.status_code == 200


@pytest.mark.parametrize("status", [404, 400])
async def test_a_refusal_ends_the_turn(client, status):
    path = "sessions/unknown" if status == 404 else "training_runs?limit=x"
    for _ in range(3):
        answer = await asyncio.wait_for(client.get(path), SECONDS)
        assert answer.status_code == status


async def test_readers_of_one_owner_are_refused_when_too_many_wait(client, app, monkeypatch):
    turns = app.state.services.turns
    monkeypatch.setattr(turns, "_most_waiting", 1)
    turn = await turns.take("local", "pages")
    waiting = asyncio.ensure_future(client.get("training_runs"))
    while turns._in_line["local", "pages"] < 2:
        await asyncio.sleep(0.01)
    refused = await client.get("checkpoints")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    turn.sent()
    assert (await waiting).status_code == 200


async def test_a_body_is_gone_with_its_connection(client, port):
    gc.collect()
    gc.disable()
    try:
        async with connected(port) as (reader, writer):
            body = b"{" + b" " * 300_000 + b"}"
            writer.write(head("create_session", connection="close", content_length=len(body)) + body)
            assert b" 200 OK" in await answer_of(reader)
        del body
        kept = [each for each in gc.get_objects() if type(each).__name__ == "ScopeState"]
        assert not [each for each in kept if isinstance(each.body, bytes) and len(each.body) > 100_000]
    finally:
        gc.enable()
