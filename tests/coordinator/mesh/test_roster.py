import asyncio

import pytest

from spmd_tx.coordinator.mesh.device_shares import DeviceShares
from spmd_tx.coordinator.mesh.roster import AgentRoster
from spmd_tx.protocol.agents import (
    AgentHello,
    AgentLeaves,
    AgentRefuses,
    CountDevices,
    DevicesFound,
    Quit,
    Refused,
    StartWorker,
    StopWorker,
    WorkerEnded,
    decode_order,
)

HOSTS = {"node-a": "10.0.0.1", "node-b": "10.0.0.2"}


class Network:
    """Which agents can be reached, and what they were told."""

    def __init__(self):
        self.told = {}
        self.unreachable = set()

    def send(self, identity, message):
        self.told.setdefault(identity, []).append(decode_order(message))
        return identity not in self.unreachable


@pytest.fixture
async def network():
    return Network()


@pytest.fixture
def roster(network):
    signs = []
    roster = AgentRoster(network.send, processes=3, devices=4, on_sign=signs.append)
    roster.signs = signs
    return roster


def join(roster, process, host="node-a", *, instance="i", address=None, coordinator="node-a", connection=""):
    identity = f"{process}{instance}{connection}".encode()
    hello = AgentHello(
        process=process,
        instance=instance,
        host=host,
        address=address or HOSTS[host],
        coordinator=coordinator,
    )
    roster.take(identity, hello)
    return identity


def start(roster, generation=1):
    """The devices that each process takes."""
    devices = {}

    def order(process, device_ids):
        devices[process] = device_ids
        return StartWorker(
            generation=generation,
            process=process,
            devices=4,
            device_ids=device_ids,
            model_dir="/model",
            model_files={},
        )

    roster.start(generation, order)
    return devices


async def test_groups_on_one_host_are_dealt_its_devices_beside_each_other(network):
    shares = DeviceShares()
    dealt = []
    for group in ("main", "teacher"):
        shares.expect("node-a", group)
    for group, count in (("main", 4), ("teacher", 2)):
        roster = AgentRoster(network.send, 1, count, print, group=group, shares=shares)
        join(roster, 0, instance=group)
        dealt.append(start(roster)[0])
    assert dealt == [[0, 1, 2, 3], [4, 5]]


async def test_it_is_known_who_is_absent(roster):
    join(roster, 1)
    assert roster.absent() == [0, 2]


def found(roster, identity, process, count):
    roster.take(identity, DevicesFound(process=process, kind="gpu", count=count))


async def test_all_agents_are_asked_for_their_devices(roster, network):
    identities = [join(roster, process, "node-b") for process in range(3)]
    counting = asyncio.create_task(roster.count_devices())
    for process, identity in enumerate(identities):
        await asyncio.sleep(0)
        assert not counting.done()
        assert network.told[identity][-1] == CountDevices()
        found(roster, identity, process, count=process)
    assert [(each.host, each.found.count) for each in await counting] == [("node-b", n) for n in range(3)]


async def test_nobody_waits_for_the_devices_of_an_agent_that_has_left(roster):
    identities = [join(roster, process) for process in range(3)]
    counting = asyncio.create_task(roster.count_devices())
    await asyncio.sleep(0)
    found(roster, identities[0], 0, count=8)
    roster.take(identities[1], AgentRefuses(process=1, reason="it is of no use"))
    assert await counting is None


async def test_processes_that_share_a_host_share_its_devices_and_others_take_all(roster):
    join(roster, 0, "node-a")
    join(roster, 1, "node-b")
    join(roster, 2, "node-a")
    assert start(roster) == {0: [0, 1, 2, 3], 1: None, 2: [4, 5, 6, 7]}


@pytest.mark.parametrize(
    "address, host_of_another, expected",
    [
        ("10.0.0.1", "node-b", "10.0.0.1"),
        ("127.0.0.1", "node-b", "head.cluster"),
        ("127.0.0.1", "node-a", "127.0.0.1"),
    ],
)
async def test_process_0_is_where_other_hosts_reach_it(roster, address, host_of_another, expected):
    join(roster, 0, address=address, coordinator="127.0.0.1")
    join(roster, 1, host_of_another, coordinator="head.cluster")
    assert roster.leader_address() == expected


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.1"])
async def test_processes_of_one_host_meet_over_loopback(roster, address):
    """Nobody else can reach them there."""
    join(roster, 0, address=address)
    join(roster, 1, address=address)
    assert roster.leader_address() == "127.0.0.1"


async def test_a_worker_that_ended_is_a_sign(roster):
    identity = join(roster, 0, "node-b")
    start(roster, generation=4)
    roster.take(identity, WorkerEnded(process=0, generation=3, code=0, last_lines=[]))
    assert roster.signs == []
    roster.take(identity, WorkerEnded(process=0, generation=4, code=1, last_lines=["boom"]))
    [sign] = roster.signs
    assert (sign.text, sign.last_lines) == ("worker 0 on node-b exited with code 1", ("boom",))


async def test_an_agent_that_cannot_be_reached_has_lost_its_worker(roster, network):
    identity = join(roster, 0)
    start(roster)
    roster.passed(0.5)
    assert roster.signs == []
    network.unreachable.add(identity)
    roster.passed(0.5)
    assert "the agent of worker 0 on node-a has lost its connection" in roster.signs[0].text
    assert roster.absent() == [0, 1, 2]


async def test_the_loss_of_an_agent_without_worker_is_no_sign(roster, network):
    network.unreachable.add(join(roster, 0))
    roster.passed(0.5)
    assert (roster.signs, roster.absent()) == ([], [0, 1, 2])


async def test_an_agent_that_comes_back_has_lost_its_worker(roster):
    join(roster, 0)
    start(roster)
    join(roster, 0, connection="again")
    assert len(roster.signs) == 1
    assert roster.absent() == [1, 2]


async def test_another_agent_may_follow_one_that_is_gone_but_not_one_that_is_there(roster, network):
    first = join(roster, 0, instance="first")
    second = join(roster, 0, instance="second")
    assert network.told[second] == [
        Refused(
            reason="worker 0 has an agent already, on node-a; end one of the two",
            is_final=False,
        )
    ]
    network.unreachable.add(first)
    join(roster, 0, instance="second")
    start(roster)
    assert isinstance(network.told[second][-1], StartWorker)


async def test_stopping_waits_for_the_workers(roster, network):
    identity = join(roster, 0)
    start(roster)
    stopping = asyncio.create_task(roster.stop(timeout=30))
    await asyncio.sleep(0.01)
    assert not stopping.done()
    assert network.told[identity][-1] == StopWorker(generation=1)
    roster.take(identity, WorkerEnded(process=0, generation=1, code=-9, last_lines=[]))
    await stopping
    assert roster.absent() == [1, 2]


async def test_an_agent_that_cannot_stop_its_worker_is_given_up(roster):
    join(roster, 0)
    start(roster)
    await roster.stop(timeout=0.01)
    assert roster.absent() == [0, 1, 2]


async def test_all_agents_are_told_to_quit(roster, network):
    identities = [join(roster, process) for process in range(3)]
    roster.quit()
    assert [network.told[identity][-1] for identity in identities] == [Quit()] * 3


async def test_an_agent_that_has_to_leave_is_told_to_end_when_it_is_let_go(roster, network):
    agents = [join(roster, process) for process in range(3)]
    start(roster)
    roster.take(b"a stranger", AgentLeaves(process=1, seconds=20.0))
    roster.take(agents[1], AgentLeaves(process=1, seconds=20.0))
    leaving = await roster.leaving()
    assert (leaving.process, leaving.seconds) == (1, 20.0)
    assert roster.signs == []
    roster.let_go(1)
    roster.let_go(1)
    assert [each for each in network.told[agents[1]] if isinstance(each, Quit)] == [Quit()]
    (sign,) = roster.signs
    assert "worker 1 on node-a has left, as it had announced" in sign.text
    assert sign.was_announced
    assert not sign.by_command
    assert roster.absent() == [1]
