import asyncio
import socket
from contextlib import asynccontextmanager

import pytest

from spmd_tx.coordinator.agent import link
from spmd_tx.coordinator.agent.link import AgentLink, LinkChange, local_address
from spmd_tx.coordinator.mesh.port import WorkerPort
from spmd_tx.protocol.agents import AgentBeat, Quit
from spmd_tx.protocol.encoding import encode
from spmd_tx.protocol.secret import Keys
from tests.support.ports import free_port

KEYS = Keys.of("the secret of this test")
SECONDS = 30.0


@pytest.fixture
def names(monkeypatch):
    """What names stand for."""
    names = {}
    real = asyncio.BaseEventLoop.getaddrinfo

    async def getaddrinfo(loop, host, port, **options):
        found = [await real(loop, each, port, **options) for each in names.get(host, [host])]
        return [one for many in found for one in many]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(link, "RECONNECT_SECONDS", 0.02)
    return names


@asynccontextmanager
async def linked(coordinator):
    made = AgentLink(coordinator, KEYS)
    try:
        async with asyncio.timeout(SECONDS):
            yield made
    finally:
        await made.close()


async def exchange(port, made):
    """Send a report there and an order back."""
    assert await made.next() == LinkChange.CONNECTED
    made.send(AgentBeat(process=3))
    identity, report = await port.receive()
    assert report == AgentBeat(process=3)
    assert port.send(identity, encode(Quit()))
    assert await made.next() == Quit()


async def test_of_several_addresses_the_one_that_answers_is_taken(names):
    port = WorkerPort("127.0.0.1", 0, KEYS)
    names["head"] = ["127.0.0.2", "::1", "127.0.0.1"]
    async with linked(f"head:{port.port}") as made:
        await exchange(port, made)
        assert made.address == f"127.0.0.1:{port.port}"
    port.close()


async def test_a_name_may_stand_for_another_address_after_a_loss(names):
    port = WorkerPort("127.0.0.1", 0, KEYS)
    names["head"] = ["127.0.0.1"]
    async with linked(f"head:{port.port}") as made:
        await exchange(port, made)
        number = port.port
        port.close()
        assert await made.next() == LinkChange.LOST
        names["head"] = ["127.0.0.2"]
        other = WorkerPort("127.0.0.2", number, KEYS)
        await exchange(other, made)
        assert made.address == f"127.0.0.2:{number}"
        other.close()


@pytest.mark.parametrize(
    "host, why",
    [
        ("head", "127.0.0.1: Connection refused; 127.0.0.2: Connection refused"),
        ("nobody.invalid", "nobody.invalid: "),
        ("a..b", "a..b: .*label empty or too long"),
    ],
)
async def test_a_coordinator_that_cannot_be_reached_is_told_of_with_the_reason(names, caplog, host, why):
    names["head"] = ["127.0.0.1", "127.0.0.2"]
    address = f"{host}:{free_port()}"
    async with linked(address) as made:
        while not made.problem:
            await asyncio.sleep(0.01)
        assert made.problem.startswith(why.partition(".*")[0])
    assert f"cannot reach the coordinator at {address} (" in caplog.text


@pytest.mark.parametrize("peer, own", [("127.0.0.1:1", "127.0.0.1"), ("[::1]:1", "::1")])
def test_the_own_address_is_of_the_family_of_the_peer(peer, own):
    if own == "::1" and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    assert local_address(peer) == own
