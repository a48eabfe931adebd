import asyncio

import pytest

from spmd_tx.coordinator.requests import completions as module
from spmd_tx.coordinator.requests.completions import Completion, Completions, SamplerClient
from spmd_tx.coordinator.requests.records import Failed, Finished, Outcome

ME = SamplerClient("s:sample:0", 0)
COPY = SamplerClient("s:sample:0", 7)
RESULT = Finished("application/json", b"a result")


class Log:
    """What is durable, as the real one answers."""

    def __init__(self, last=0):
        self.entries = []
        self.reads = 0
        self.completions = Completions(last, self.read)

    async def read(self, target, span):
        self.reads += 1
        await asyncio.sleep(0)
        found = [each for whose, each in self.entries if whose == target]
        return [each for each in found if span.after < each.number <= span.last][: span.most]

    def end(self, name, target=ME, failed=False):
        completion = Completion(self.completions.next_number(), name, failed, None if failed else 8)
        self.entries.append((target, completion))
        self.completions.announce(target.sampler, target.seq_ids.start + 3, completion)
        return completion.number


def ids(completions):
    return [each.request_id for each in completions]


async def ask(log, number, target=ME):
    return await log.completions.after(target, number)


async def test_numbers_grow_also_when_the_clock_does_not(monkeypatch):
    monkeypatch.setattr(module.clock, "now", lambda: 5.0)
    completions = Completions(4_999_999, Log().read)
    assert [completions.next_number() for _ in range(3)] == [5_000_000, 5_000_001, 5_000_002]
    later = Completions(9_000_000, Log().read)  # the clock was set back
    assert later.next_number() == 9_000_001


async def test_a_client_is_told_what_is_new_to_it_once_and_in_order():
    log = Log()
    first = log.end("a")
    assert ids(await ask(log, 0)) == ["a"]
    log.end("b", failed=True)
    last = log.end("c")
    news = await ask(log, first)
    assert [(each.request_id, each.failed) for each in news] == [("b", True), ("c", False)]
    assert await ask(log, last) == []


async def test_a_client_whose_answer_was_lost_is_told_again():
    log = Log()
    await ask(log, 0)
    numbers = [log.end(name) for name in "abc"]
    assert ids(await ask(log, 0)) == ids(await ask(log, 0)) == ["a", "b", "c"]
    assert ids(await ask(log, numbers[1])) == ["c"]
    assert ids(await ask(log, numbers[0])) == ["b", "c"]  # of which b is not held any more


async def test_a_client_that_keeps_asking_costs_no_reading():
    log = Log()
    number = log.end("a")
    await ask(log, 0)
    reads = log.reads
    for name in "bcdef":
        number, before = log.end(name), number
        assert ids(await ask(log, before)) == [name]
    assert log.reads == reads


async def test_copies_of_a_client_are_told_only_of_their_own():
    log = Log()
    for target in (ME, COPY):
        await ask(log, 0, target)
    log.end("mine")
    log.end("its", COPY)
    assert ids(await ask(log, 0)) == ["mine"]
    assert ids(await ask(log, 0, COPY)) == ["its"]


async def test_waiting_ends_with_the_first_news():
    log = Log()
    assert await ask(log, 0) == []
    waiting = asyncio.create_task(log.completions.wait(ME))
    await asyncio.sleep(0)
    log.end("its", COPY)
    await asyncio.sleep(0)
    assert not waiting.done()
    log.end("mine")
    await waiting
    assert ids(await ask(log, 0)) == ["mine"]


async def test_a_client_that_waits_is_told_whoever_else_asks(monkeypatch):
    monkeypatch.setattr(module, "MAX_TARGETS", 2)
    log = Log()
    assert await ask(log, 0) == []
    waiting = asyncio.create_task(log.completions.wait(ME))
    await asyncio.sleep(0)
    for client in range(100):
        await ask(log, 0, SamplerClient("another's", client))
    assert len(log.completions._targets) <= 3
    log.end("mine")
    await waiting
    assert ids(await ask(log, 0)) == ["mine"]


async def test_what_ends_while_the_log_is_read_is_not_lost():
    log = Log()
    log.end("a")
    asking = asyncio.create_task(ask(log, 0))
    await asyncio.sleep(0)
    log.end("b")
    told = await asking
    assert ids(told) + ids(await ask(log, told[-1].number)) == ["a", "b"]


async def test_many_completions_come_in_portions(monkeypatch):
    monkeypatch.setattr(module, "MAX_AT_ONCE", 4)
    log = Log()
    for number in range(6):
        log.end(f"{number}")
    await ask(log, 0)
    for number in range(6, 15):
        log.end(f"{number}")
    told, cursor = [], 0
    while news := await ask(log, cursor):
        assert len(news) <= 4
        told, cursor = [*told, *ids(news)], news[-1].number
    assert told == [f"{number}" for number in range(15)]


@pytest.mark.parametrize("limit, value", [("MAX_TARGETS", 1), ("MAX_UNREAD", 2)])
async def test_what_is_not_held_any_more_is_read(monkeypatch, limit, value):
    monkeypatch.setattr(module, limit, value)
    log = Log()
    await ask(log, 0)
    await ask(log, 0, COPY)
    for name in "abcd":
        log.end(name)
        log.end(name + " of the copy", COPY)
    assert ids(await ask(log, 0)) == ["a", "b", "c", "d"]
    assert ids(await ask(log, 0, COPY)) == [f"{name} of the copy" for name in "abcd"]


async def test_a_number_that_was_never_given_means_everything():
    log = Log()
    log.end("a")
    assert ids(await ask(log, 2**62)) == ["a"]


async def test_completions_outlive_a_restart_of_the_server(database, tmp_path, running_queue):
    async def answer(queue, seq_id, outcome: Outcome = RESULT, kind="sample", line=ME.sampler):
        request_id = await queue.submit(kind, line, seq_id, "s", b"{}")
        queue.resolve(request_id, outcome)
        await queue.wait(request_id, timeout=60)
        return request_id

    async with running_queue(database, tmp_path) as queue:
        await queue.completions.after(ME, 0)
        first = await answer(queue, 0)
        (seen,) = await queue.completions.after(ME, 0)
        assert (seen.request_id, seen.failed, seen.size) == (first, False, len(RESULT.body))
        unseen = await answer(queue, 1, Failed("no", "user"))
        await answer(queue, COPY.seq_ids.start)
        await answer(queue, 2, kind="optim_step", line="s:train:0")
    async with running_queue(database, tmp_path) as queue:
        last = await answer(queue, 2)
        news = await queue.completions.after(ME, seen.number)
        assert [(each.request_id, each.failed) for each in news] == [(unseen, True), (last, False)]
        assert await queue.completions.after(ME, news[-1].number) == []


async def test_only_samples_are_told_of(queue):
    await queue.completions.after(ME, 0)
    step = await queue.submit("optim_step", ME.sampler, 0, "s", b"{}")
    queue.resolve(step, RESULT)
    await queue.wait(step, timeout=60)
    assert await queue.completions.after(ME, 0) == []


async def test_a_result_that_was_let_go_can_still_be_read(queue):
    request_id = await queue.submit("sample", ME.sampler, 0, "s", b"{}")
    queue.resolve(request_id, RESULT)
    await queue.wait(request_id, timeout=60)
    queue.let_go([request_id, "unknown"])
    assert await queue.wait(request_id, timeout=0) == RESULT
