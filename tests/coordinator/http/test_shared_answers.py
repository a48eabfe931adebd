import asyncio
from types import SimpleNamespace

import pytest

from spmd_tx.coordinator.http import shared_answers
from spmd_tx.coordinator.http.shared_answers import SharedAnswers


@pytest.fixture
def now(monkeypatch):
    """The time that answers go by, in a list."""
    now = [100.0]
    monkeypatch.setattr(shared_answers, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


async def test_those_who_ask_at_the_same_time_get_one_answer(now):
    answers, made = SharedAnswers(), []
    may_end = asyncio.Event()

    async def make():
        number = len(made)
        made.append(number)
        await may_end.wait()
        return number

    waiting = [asyncio.create_task(answers.get("runs", make)) for _ in range(3)]
    other = asyncio.create_task(answers.get("run", make))
    await asyncio.sleep(0)
    waiting[0].cancel()  # a console that is closed
    may_end.set()
    assert await asyncio.gather(*waiting[1:], other) == [0, 0, 1]
    assert made == [0, 1]
    now[0] += 0.9
    assert await answers.get("runs", make) == 0
    now[0] += 0.2
    assert await answers.get("runs", make) == 2


async def test_a_costly_answer_is_kept_in_proportion_to_what_it_took(now):
    answers, made = SharedAnswers(), []

    async def make():
        made.append(now[0])
        now[0] += 0.2
        return len(made)

    for at, expected in ((0.0, 1), (0.3, 1), (3.9, 1), (4.1, 1), (4.3, 2), (4.4, 2)):
        now[0] = 100.0 + at
        assert await answers.get_costly("timing", make) == expected, at


async def test_an_error_of_a_costly_answer_is_not_kept():
    answers, outcomes = SharedAnswers(), [ValueError("no"), 7]

    async def make():
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    with pytest.raises(ValueError, match="no"):
        await answers.get_costly("timing", make)
    assert await answers.get_costly("timing", make) == 7


async def test_an_error_reaches_all_of_them():
    answers = SharedAnswers()

    async def make():
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            await answers.get("runs", make)
