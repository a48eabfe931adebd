import asyncio

import pytest

from spmd_tx.coordinator.http import shared_answers
from spmd_tx.coordinator.http.shared_answers import SharedAnswers


async def test_those_who_ask_at_the_same_time_get_one_answer(monkeypatch):
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
    monkeypatch.setattr(shared_answers, "KEPT_SECONDS", -1.0)
    assert await answers.get("runs", make) == 2


async def test_an_error_reaches_all_of_them():
    answers = SharedAnswers()

    async def make():
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            await answers.get("runs", make)
