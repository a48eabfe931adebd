import asyncio

from spmd_tx.coordinator.runtime.byte_budget import ByteBudget


async def turn():
    await asyncio.sleep(0)


async def test_who_comes_first_gets_room_first_even_if_less_would_do_for_others():
    room, order = ByteBudget(10), []

    async def take(size):
        await room.take(size)
        order.append(size)

    await room.take(8)
    waiting = [asyncio.create_task(take(size)) for size in (5, 1)]
    await turn()
    assert order == []
    room.give_back(8)
    await asyncio.gather(*waiting)
    assert order == [5, 1]
    assert room.free == 4


async def test_what_is_larger_than_the_room_takes_all_of_it():
    room = ByteBudget(10)
    assert await room.take(25) == 10
    assert room.free == 0


async def test_who_stops_waiting_lets_others_in_and_takes_nothing():
    room = ByteBudget(10)
    await room.take(8)
    large, small = [asyncio.create_task(room.take(size)) for size in (5, 1)]
    await turn()
    large.cancel()
    assert await small == 1
    room.give_back(1)
    room.give_back(8)
    assert room.free == 10


async def test_who_is_cancelled_when_its_turn_has_come_gives_it_back():
    room = ByteBudget(10)
    await room.take(8)
    waiting = asyncio.create_task(room.take(5))
    await turn()
    room.give_back(8)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert room.free == 10


async def test_who_is_cancelled_just_before_its_turn_would_come_ends_as_cancelled():
    room = ByteBudget(10)
    await room.take(8)
    waiting = asyncio.create_task(room.take(5))
    await turn()
    waiting.cancel()
    room.give_back(8)
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    assert room.free == 10
