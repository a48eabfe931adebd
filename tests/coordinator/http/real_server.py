"""The app behind a real socket, and a client that speaks HTTP by hand."""

import asyncio
import socket
from contextlib import asynccontextmanager, suppress

import httpx
import msgspec
import pytest

from spmd_tx.bounds import Bounds
from spmd_tx.coordinator.http.security.connections import Connections
from spmd_tx.coordinator.http.uvicorn_server import HttpServer

SECONDS = 30  # until a test gives up

DEEP = 200_000

sqlite_only = pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)


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
def bound(services):
    """Change bounds of the running server."""

    def bound(**bounds):
        services.config = msgspec.structs.replace(services.config, bounds=Bounds(**bounds))

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
