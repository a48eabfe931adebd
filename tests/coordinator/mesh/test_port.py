import asyncio
import time
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import zmq
import zmq.asyncio

from spmd_tx.coordinator.mesh import port as worker_port
from spmd_tx.coordinator.mesh.port import WorkerPort
from spmd_tx.errors import StartError
from spmd_tx.protocol.encoding import encode
from spmd_tx.protocol.reports import FRAME_BYTES, Hello, Reply, in_frames
from spmd_tx.protocol.secret import Keys

KEYS = Keys.of("the secret of this test")
OTHERS = Keys.of("another secret of this test")
SECONDS = 15.0  # until a test gives up: less than ZeroMQ's own patience
HELLO = Hello(generation=1, process=0)


@pytest.fixture
async def port():
    port = WorkerPort("127.0.0.1", 0, KEYS)
    yield port
    port.close()


@pytest.fixture
async def connect(port):
    context, sockets = zmq.asyncio.Context(), []

    def connect(keys):
        sockets.append(context.socket(zmq.DEALER))
        if keys is not None:
            keys.introduce(sockets[-1])
        sockets[-1].connect(f"tcp://{port.local_address}")
        return sockets[-1]

    yield connect
    for socket in sockets:
        socket.close(linger=0)
    context.term()


async def test_who_knows_the_secret_is_heard_and_answered(port, connect):
    socket = connect(KEYS)
    await socket.send(encode(HELLO))
    identity, report = await port.receive()
    assert report == HELLO
    assert port.send(identity, b"welcome")
    assert await socket.recv() == b"welcome"


@pytest.mark.parametrize(
    "keys",
    [
        OTHERS,
        None,
        replace(KEYS, client_public=OTHERS.client_public, client_secret=OTHERS.client_secret),
    ],
    ids=["another secret", "no encryption", "only the server's key"],
)
async def test_who_does_not_is_not_heard(port, connect, keys):
    stranger = connect(keys)
    sending = asyncio.ensure_future(stranger.send(encode(HELLO)))
    receiving = asyncio.create_task(port.receive())
    assert await asyncio.wait([receiving], timeout=0.3) == (set(), {receiving})
    friend = connect(KEYS)
    await friend.send(encode(Hello(generation=2, process=7)))
    assert (await receiving)[1].process == 7
    sending.cancel()


async def test_noise_is_ignored(port, connect):
    socket = connect(KEYS)
    for message in (b"", b"noise", b"\x81\xa2op\xa5reply", encode(HELLO)):
        await socket.send(message)
    assert (await port.receive())[1] == HELLO


async def test_sending_to_somebody_who_is_gone_says_so(port, connect):
    socket = connect(KEYS)
    await socket.send(encode(HELLO))
    identity, _ = await port.receive()
    socket.close(linger=0)
    while port.send(identity, b"are you there"):
        await asyncio.sleep(0.01)
    assert not port.send(b"nobody", b"are you there")


async def test_what_arrives_while_something_is_sent_is_received(port, connect):
    socket = connect(KEYS)
    await socket.send(encode(HELLO))
    identity, _ = await port.receive()
    for process in range(3):
        receiving = asyncio.create_task(port.receive())
        await asyncio.sleep(0)  # it waits
        await socket.send(encode(Hello(generation=1, process=process)))
        time.sleep(0.05)  # the event loop does not see it arrive
        for _ in range(200):
            port.send(identity, b"meanwhile")
        _, report = await asyncio.wait_for(receiving, SECONDS)
        assert report.process == process


async def test_a_report_of_any_length_arrives(port, connect):
    socket = connect(KEYS)
    values = np.arange(3 * FRAME_BYTES, dtype=np.float32)
    reply = Reply(generation=1, process=0, sequence=0, arrays={"logprobs": values})
    await socket.send_multipart(in_frames(encode(reply)))
    _, report = await port.receive()
    assert np.array_equal(report.arrays["logprobs"], values)


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
LONG_FRAME = b"\x02" + (2 << 30).to_bytes(8, "big")  # ZMTP 3.1


async def hung_up(reader):
    """Read until the other end is gone."""
    async with asyncio.timeout(SECONDS):
        with suppress(ConnectionError):
            while await reader.read(1 << 16):
                pass


@pytest.mark.parametrize("command", [b"\x02", b"\x06"], ids=["message", "command"])
async def test_a_stranger_who_announces_a_long_frame_is_cut_off_before_it_comes(port, command):
    reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
    writer.write(GREETING)
    await reader.readexactly(len(GREETING))
    writer.write(command + LONG_FRAME[1:] + bytes(1 << 16))
    await hung_up(reader)
    writer.close()


@pytest.fixture
def short_handshake(monkeypatch):
    monkeypatch.setattr(worker_port, "HANDSHAKE_MS", 100)


@pytest.mark.parametrize(
    "said", [b"", GREETING[:10], GREETING], ids=["nothing", "half a greeting", "greeting"]
)
async def test_who_does_not_say_who_they_are_is_cut_off(short_handshake, port, said):
    reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
    writer.write(said)
    await hung_up(reader)
    writer.close()


@pytest.mark.parametrize(
    "host, message",
    [
        ("127.0.0.1", r"port \d+ of 127.0.0.1 is in use; end that program, or set another --worker-port"),
        ("203.0.113.1", "cannot listen for workers on 203.0.113.1, .* check --worker-host"),
    ],
)
async def test_an_address_that_cannot_be_used_is_refused(port, host, message):
    with pytest.raises(StartError, match=message):
        WorkerPort(host, port.port, KEYS)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
async def test_all_addresses_include_the_loopback_one(host):
    port = WorkerPort(host, 0, KEYS)
    assert port.local_address == f"127.0.0.1:{port.port}"
    _, writer = await asyncio.open_connection("127.0.0.1", port.port)
    writer.close()
    port.close()


async def test_an_ipv6_address_is_written_in_brackets():
    try:
        port = WorkerPort("::1", 0, KEYS)
    except StartError as error:
        pytest.skip(f"this machine has no IPv6: {error}")
    assert port.local_address == f"[::1]:{port.port}"
    _, writer = await asyncio.open_connection("::1", port.port)
    writer.close()
    port.close()
