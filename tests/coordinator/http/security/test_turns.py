import asyncio

import pytest

from spmd_tx.bounds import Bounds
from spmd_tx.coordinator.http.security import turns as turns_module
from spmd_tx.coordinator.http.security.turns import Turns
from spmd_tx.errors import TooManyRequests


@pytest.fixture(autouse=True)
def no_rest(monkeypatch):
    monkeypatch.setattr(turns_module, "MOST_REST_SECONDS", 0.0)


async def settled():
    for _ in range(10):
        await asyncio.sleep(0)


async def waiting_for(turns, owner, what="pages"):
    task = asyncio.ensure_future(turns.take(owner, what))
    await settled()
    return task


async def test_an_owner_has_one_answer_at_a_time_and_others_do_not_wait_for_it():
    turns = Turns(Bounds())
    first = await turns.take("alice", "pages")
    second = await waiting_for(turns, "alice")
    await turns.take("bob", "pages")
    await turns.take("alice", "changes")
    assert not second.done()
    first.made()
    await settled()
    assert not second.done()  # it is not sent yet
    first.sent()
    await asyncio.wait_for(second, 60)


async def test_all_owners_together_make_some_answers_at_a_time_and_may_be_slow_to_read_them():
    turns = Turns(Bounds(answers_at_once=2))
    one, _ = [await turns.take(owner, "pages") for owner in ("alice", "bob")]
    third = await waiting_for(turns, "carol")
    assert not third.done()
    one.made()
    await asyncio.wait_for(third, 60)


async def test_too_many_who_wait_are_told_to_come_again():
    turns = Turns(Bounds(answers_waiting=2))
    await turns.take("alice", "pages")
    waiting = [await waiting_for(turns, "alice") for _ in range(2)]
    with pytest.raises(TooManyRequests, match="the limit answers_waiting") as refused:
        await turns.take("alice", "pages")
    assert refused.value.seconds > 0
    waiting[0].cancel()
    await settled()
    await waiting_for(turns, "alice")


async def test_nothing_is_left_when_all_have_had_their_turn():
    turns = Turns(Bounds())
    first = await turns.take("alice", "pages")
    gone = await waiting_for(turns, "alice")
    gone.cancel()
    first.sent()
    await asyncio.sleep(0.01)
    assert not turns._lines
    assert not turns._in_line


async def test_an_owner_rests_for_as_long_as_an_answer_took(monkeypatch):
    monkeypatch.setattr(turns_module, "MOST_REST_SECONDS", 3600.0)
    now = [0.0]
    monkeypatch.setattr(turns_module.time, "monotonic", lambda: now[0])
    turns = Turns(Bounds())
    first = await turns.take("alice", "pages")
    now[0] += 1000.0
    first.sent()
    assert not (await waiting_for(turns, "alice")).done()
    assert (await waiting_for(turns, "bob")).done()
