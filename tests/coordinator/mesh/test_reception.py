"""Agents that join the groups of a server: with a number, or without one as workers of replicas."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd_tx.coordinator.mesh import generations
from spmd_tx.coordinator.mesh.reception import Reception
from spmd_tx.coordinator.mesh.replica_places import AgentPlace, ReplicaPlaces, place_on
from spmd_tx.coordinator.mesh.roster import AgentRoster
from spmd_tx.protocol.agents import ANY_PROCESS, AgentBeat, AgentHello, AgentLeaves, Refused, decode_order
from tests.coordinator.mesh.worker_group import worker_group, write_model

HOSTS = st.sampled_from("abc")


class Group:
    """Stands for the generations of a group: it has the roster of one."""

    def __init__(self, send, processes):
        self.roster = AgentRoster(send, processes, devices=1, on_sign=print)


class Entrance:
    """Is the port of a reception: what has arrived there, and what was sent to whom."""

    def __init__(self, processes=1, late=()):
        self.told = {}
        names = ["main", *(f"rollouts/{number}" for number in range(2))]
        self.groups = {name: Group(self.send, processes) for name in names}
        self.late = {name: asyncio.Event() for name in late}
        self.reception = Reception(self, self.groups, self.late)

    def send(self, identity, message):
        self.told.setdefault(identity, []).append(decode_order(message))
        return True

    async def receive(self):
        if not self.arrived:
            raise EOFError
        return self.arrived.pop(0)

    async def take(self, name, report):
        self.arrived = [(name.encode(), report)]
        with pytest.raises(EOFError):
            await self.reception.receive()

    async def join(self, name, group="rollouts", process=ANY_PROCESS, host="a"):
        hello = AgentHello(
            process=process, instance=name, host=host, address="10.0.0.1", coordinator="c", group=group
        )
        await self.take(name, hello)
        return self.place_of(name)

    def place_of(self, name):
        found = [(each, group.roster.process_of(name)) for each, group in self.groups.items()]
        return next((place for place in found if place[1] is not None), None)

    def refusal(self, name):
        last = self.told[name.encode()][-1]
        assert isinstance(last, Refused)
        return last


async def test_agents_without_a_number_make_one_replica_after_the_other():
    entrance = Entrance()
    assert [await entrance.join(name) for name in "xyz"] == [("rollouts/0", 0), ("rollouts/1", 0), None]
    assert entrance.refusal("z") == Refused(
        reason="rollouts has its 2 replicas; waiting for a place", is_final=False
    )
    entrance.groups["rollouts/0"].roster.let_go(0)
    assert await entrance.join("z") == ("rollouts/0", 0)


async def test_a_replica_of_several_workers_is_completed_before_the_next_one_begins():
    entrance = Entrance(processes=2)
    joined = [await entrance.join(name, host=host) for name, host in zip("vwxy", "abab", strict=True)]
    assert joined == [("rollouts/0", 0), ("rollouts/0", 1), ("rollouts/1", 0), ("rollouts/1", 1)]


async def test_an_agent_that_connects_again_keeps_its_place():
    entrance = Entrance()
    await entrance.join("x")
    assert await entrance.join("y") == await entrance.join("y") == ("rollouts/1", 0)


async def test_what_an_agent_without_a_number_says_is_of_the_worker_that_it_has_become():
    entrance = Entrance(processes=2)
    for name in "xy":
        await entrance.join(name)
    await entrance.take("y", AgentLeaves(process=ANY_PROCESS, seconds=5.0))
    assert await entrance.groups["rollouts/0"].roster.leaving() == AgentLeaves(process=1, seconds=5.0)


async def test_replicas_that_lack_an_agent_each_become_one_that_is_complete():
    entrance = Entrance(processes=2)
    for name in "vwxy":
        await entrance.join(name)
    rosters = [entrance.groups[f"rollouts/{number}"].roster for number in range(2)]
    for roster in rosters:
        roster.let_go(0)
        roster.release()
    assert not entrance.refusal("w").is_final
    assert [await entrance.join(name) for name in "wy"] == [("rollouts/0", 0), ("rollouts/0", 1)]


async def test_an_agent_with_a_number_of_its_own_is_not_released():
    entrance = Entrance(processes=2)
    assert await entrance.join("x", group="rollouts/1", process=1) == ("rollouts/1", 1)
    entrance.groups["rollouts/1"].roster.release()
    assert entrance.place_of("x") == ("rollouts/1", 1)


@pytest.mark.parametrize(
    ("group", "process", "reason"),
    [
        ("main", ANY_PROCESS, "group main has no replicas; give a worker its number, as --process-id"),
        ("", ANY_PROCESS, "group main has no replicas; give a worker its number, as --process-id"),
        (
            "rollout",
            0,
            "there is no group rollout; groups: main, rollouts; correct --group of spmd-tx worker",
        ),
        ("rollouts", 3, "name one replica, as in --group rollouts/0"),
    ],
)
async def test_an_agent_that_names_no_place_of_the_server_is_told_so(group, process, reason):
    entrance = Entrance()
    assert await entrance.join("x", group, process) is None
    assert entrance.refusal("x").is_final
    assert reason in entrance.refusal("x").reason


async def test_an_agent_of_replicas_that_cannot_be_opened_yet_has_them_tried_again():
    entrance = Entrance(late=["judge/0", "judge/1"])
    assert await entrance.join("x", "judge") is None
    assert not entrance.refusal("x").is_final
    assert all(event.is_set() for event in entrance.late.values())


async def test_what_a_stranger_says_is_ignored():
    entrance = Entrance()
    await entrance.take("x", AgentBeat(process=0))
    assert entrance.told == {}


@given(st.lists(HOSTS, min_size=1, max_size=12), st.integers(1, 3))
def test_places_are_dealt_until_all_are_taken_and_at_most_one_replica_is_incomplete(hosts, processes):
    taken = {name: dict[int, str]() for name in ("r/0", "r/1", "r/2")}
    for number, host in enumerate(hosts):
        places = {
            name: ReplicaPlaces([each for each in range(processes) if each not in there], set(there.values()))
            for name, there in taken.items()
        }
        place = place_on(host, places)
        assert (place is None) == (number >= processes * len(taken))
        if place is not None:
            assert place.process not in taken[place.group]
            taken[place.group][place.process] = host
        assert sum(0 < len(there) < processes for there in taken.values()) <= 1


def test_a_worker_is_put_beside_those_of_its_host():
    replicas = {"r/0": ReplicaPlaces([1], {"a"}), "r/1": ReplicaPlaces([0], {"b"})}
    assert place_on("b", replicas) == AgentPlace("r/1", 0)


async def test_an_agent_without_a_number_works_and_makes_room_for_the_next(tmp_path):
    """Agents, port and processes are real here, and the workers are fake."""
    model_dir = write_model(tmp_path / "model")
    async with worker_group(model_dir, agents=[], name="rollouts/0") as group:
        options = {"process": ANY_PROCESS, "group": "rollouts"}
        first = group.agent(**options)
        await group.until_ready()
        await group.create()
        assert group.agents[0].leave(5.0)
        leaving = await group.roster.leaving()
        assert leaving == AgentLeaves(process=0, seconds=5.0)
        group.roster.let_go(leaving.process)
        await first
        group.agent(**options)
        await group.until_ready()
        await group.create()
        assert group.counted == 2


async def test_an_agent_does_not_stay_in_a_replica_that_nobody_completes(tmp_path, monkeypatch):
    monkeypatch.setattr(generations, "RELEASE_SECONDS", 0.1)
    model_dir = write_model(tmp_path / "model")
    async with worker_group(model_dir, agents=[], name="rollouts/0", processes=2) as group:
        group.agent(ANY_PROCESS, group="rollouts")
        while not group.roster.places().hosts:
            await group.roster.changed()
        while group.roster.places().hosts:
            await group.roster.changed()
