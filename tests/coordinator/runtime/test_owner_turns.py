import asyncio

import pytest

from spmd_tx.coordinator.runtime.owner_turns import OwnerTurns


class Visits:
    """Who has a place."""

    def __init__(self, places, most_of_one):
        self.turns = OwnerTurns(places, most_of_one)
        self.inside: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def _visit(self, owner):
        async with self.turns.turn(owner):
            self.inside.append(owner)
            await asyncio.Event().wait()

    async def come(self, *owners):
        self.tasks += [asyncio.create_task(self._visit(owner)) for owner in owners]
        await settled()

    async def leave(self, place):
        self.tasks[place].cancel()
        await settled()


async def settled():
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
async def visits():
    made = Visits(3, 2)
    yield made
    for each in made.tasks:
        each.cancel()
    await settled()
    assert made.turns._lines == {}


async def test_an_owner_has_so_many_places_and_leaves_one_to_others(visits):
    await visits.come("mallory", "mallory", "mallory", "mallory", "alice")
    assert visits.inside == ["mallory", "mallory", "alice"]


async def test_who_waits_comes_next(visits):
    await visits.come("mallory", "mallory", "mallory", "alice", "bob")
    await visits.leave(0)
    assert visits.inside == ["mallory", "mallory", "alice", "bob"]
    await visits.leave(1)
    assert visits.inside == ["mallory", "mallory", "alice", "bob", "mallory"]


async def test_who_gives_up_waiting_takes_no_place(visits):
    await visits.come("mallory", "mallory", "mallory", "mallory")
    await visits.leave(2)
    await visits.leave(0)
    assert visits.inside == ["mallory"] * 3
    await visits.come("alice")
    assert visits.inside[-1] == "alice"
