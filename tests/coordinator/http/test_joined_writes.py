import asyncio

import pytest
import uvicorn
from uvicorn.server import ServerState

from spmd_tx.coordinator.http.joined_writes import MOST_HELD, JoinedWrites
from spmd_tx.coordinator.http.security.connections import Connections
from spmd_tx.coordinator.http.uvicorn_server import GuardedProtocol


class Transport:
    """Keeps what is sent together, and when it was closed."""

    def __init__(self):
        self.sent, self.is_closed = [], False

    def write(self, data):
        assert not self.is_closed
        self.sent.append(data)

    def close(self):
        self.is_closed = True

    def is_closing(self):
        return self.is_closed

    def get_extra_info(self, name):
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else None

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass


@pytest.fixture
def transport():
    return Transport()


@pytest.fixture
async def joined(transport):
    return JoinedWrites(transport, asyncio.get_running_loop())


async def test_what_is_written_in_one_turn_is_sent_together(joined, transport):
    joined.write(b"a")
    joined.write(b"b")
    assert transport.sent == []
    await asyncio.sleep(0)
    joined.write(b"c")
    await asyncio.sleep(0)
    assert transport.sent == [b"ab", b"c"]


async def test_much_is_sent_at_once_and_in_order(joined, transport):
    joined.write(b"a")
    joined.write(bytes(MOST_HELD))
    assert transport.sent == [b"a" + bytes(MOST_HELD)]
    joined.write(b"b")
    await asyncio.sleep(0)
    assert transport.sent[1:] == [b"b"]


async def test_what_is_held_is_sent_before_hanging_up(joined, transport):
    joined.write(b"a")
    joined.close()
    await asyncio.sleep(0)
    assert transport.sent == [b"a"]
    assert joined.is_closing()


async def test_nothing_is_sent_to_a_client_that_has_gone(joined, transport):
    joined.write(b"a")
    transport.close()
    await asyncio.sleep(0)
    assert transport.sent == []


async def answer(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


async def test_an_answer_is_sent_with_its_headers(transport):
    config = uvicorn.Config(answer, ws="none", log_config=None, lifespan="off")
    config.load()
    connections = Connections(most=4, most_per_address=4)
    state = {"config": config, "server_state": ServerState(), "app_state": {}}
    protocol = GuardedProtocol(**state, connections=connections)
    protocol.connection_made(transport)
    for path in ("a", "b"):
        protocol.data_received(f"GET /{path} HTTP/1.1\r\nhost: server\r\n\r\n".encode())
        for _ in range(5):
            await asyncio.sleep(0)
    protocol.connection_lost(None)
    assert len(transport.sent) == 2
    assert all(each.startswith(b"HTTP/1.1 200") and each.endswith(b"\r\n\r\nok") for each in transport.sent)
