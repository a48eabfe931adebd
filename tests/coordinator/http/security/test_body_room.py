import asyncio

import pytest

from spmd_tx.coordinator.http.security.body_room import BodyRoom, can_all_end

PATIENCE = 0.01


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def room(clock):
    return BodyRoom(12, PATIENCE, clock)


class Sender:
    """Of one body."""

    def __init__(self, room, owner, most):
        self.room = room
        self.place = room.place(owner, most, self.leave)
        self.has_given_way = False

    def leave(self):
        self.has_given_way = True
        self.room.leave(self.place)

    async def send(self, size):
        await self.room.take(self.place, size)
        return self

    def begin_to_send(self, size):
        return asyncio.create_task(self.send(size))


async def turns():
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    "free, bodies, can",
    [
        (0, [], True),
        (2, [(2, 1), (3, 1), (4, 9)], True),  # one after the other
        (2, [(4, 9), (2, 1), (3, 1)], True),
        (2, [(3, 1), (3, 1)], False),  # both wait for each other
    ],
)
def test_whether_all_can_end(free, bodies, can):
    assert can_all_end(free, bodies) is can


async def test_a_body_takes_what_has_come_not_what_is_announced(room):
    for owner in ("alice", "bob", "carol"):
        await Sender(room, owner, 6).send(1)
    assert room.free == 9


async def test_what_is_larger_than_half_of_the_room_takes_half(room):
    sender = await Sender(room, "alice", 100).send(5)
    await sender.send(50)
    assert room.free == 6
    room.leave(sender.place)
    assert room.free == 12


async def test_bodies_of_which_a_part_is_here_never_wait_for_each_other(room):
    senders = {"alice": 4, "bob": 3, "carol": 3}
    alice, bob, carol = [await Sender(room, owner, 6).send(size) for owner, size in senders.items()]
    carol_waits = carol.begin_to_send(1)  # then none could end
    await turns()
    assert not carol_waits.done()
    await alice.send(2)
    room.be_whole(alice.place)
    room.leave(alice.place)
    await carol_waits
    await bob.send(3)
    await carol.send(2)
    assert not any(each.has_given_way for each in (alice, bob, carol))


async def test_an_owner_begins_another_body_only_while_all_come_to_half_of_the_room(room):
    first = await Sender(room, "alice", 4).send(1)
    second = Sender(room, "alice", 3).begin_to_send(1)
    await turns()
    assert not second.done()
    await Sender(room, "bob", 3).send(3)
    room.leave(first.place)
    await second


async def test_who_has_more_than_an_even_share_gives_way_and_the_slowest_of_them_first(room, clock):
    fast, slow = await Sender(room, "alice", 3).send(3), await Sender(room, "alice", 3).send(2)
    others = await Sender(room, "bob", 6).send(6)
    room.be_whole(others.place)
    clock.now = 1.0
    await Sender(room, "carol", 2).send(2)
    assert slow.has_given_way
    assert not fast.has_given_way


async def test_what_is_being_handled_does_not_give_way(room, clock):
    slow = [await Sender(room, "mallory", 1).send(1) for _ in range(6)]
    room.be_whole(slow[0].place)
    other = await Sender(room, "oscar", 6).send(6)
    room.be_whole(other.place)
    clock.now = 1.0
    await Sender(room, "alice", 2).send(2)
    assert sum(each.has_given_way for each in slow) == 2
    assert not slow[0].has_given_way
    assert not other.has_given_way


async def test_who_has_an_even_share_does_not_drive_others_away(room, clock):
    alice, bob = await Sender(room, "alice", 6).send(6), await Sender(room, "bob", 6).send(6)
    waiting = Sender(room, "bob", 1).begin_to_send(1)
    done, _ = await asyncio.wait([waiting], timeout=10 * PATIENCE)
    assert not done
    assert not alice.has_given_way
    assert not bob.has_given_way
    waiting.cancel()


async def test_who_stops_waiting_takes_nothing(room):
    alice, bob = await Sender(room, "alice", 6).send(6), await Sender(room, "bob", 6).send(6)
    waiting = [Sender(room, owner, 6).begin_to_send(5) for owner in ("carol", "dave")]
    await turns()
    waiting[0].cancel()
    await turns()
    room.leave(alice.place)
    await waiting[1]
    assert room.free == 1
    room.leave(bob.place)
    assert room.free == 7


async def test_who_is_cancelled_when_its_turn_has_come_gives_it_back(room):
    alice, bob = await Sender(room, "alice", 6).send(6), await Sender(room, "bob", 6).send(6)
    carol = Sender(room, "carol", 5)
    waiting = carol.begin_to_send(5)
    await turns()
    room.leave(alice.place)
    waiting.cancel()
    await asyncio.wait([waiting])
    room.leave(carol.place)
    room.leave(bob.place)
    assert room.free == 12


async def test_who_has_least_comes_first(room):
    order = []
    alice, bob = await Sender(room, "alice", 6).send(4), await Sender(room, "bob", 6).send(6)
    carol = await Sender(room, "carol", 2).send(2)
    for each in (bob, carol):
        room.be_whole(each.place)

    async def send(sender, size):
        order.append((await sender.send(size)).place.owner)

    waiting = [asyncio.create_task(send(alice, 2)), asyncio.create_task(send(Sender(room, "dave", 2), 2))]
    await turns()
    room.leave(carol.place)
    await turns()
    assert order == ["dave"]
    room.leave(bob.place)
    await asyncio.gather(*waiting)
    assert order == ["dave", "alice"]
