"""Requests that freeze or end the coordinator itself, which nothing can catch."""

import asyncio
import contextlib
import time

import httpx
import pytest

from spmd_tx.coordinator.requests.quarantine import Quarantine, open_quarantine
from spmd_tx.coordinator.requests.records import Failed, Finished, Request
from spmd_tx.coordinator.runtime import threads
from spmd_tx.coordinator.runtime.at_work import SLOTS, AtWork
from spmd_tx.coordinator.runtime.threads import SMALL_BYTES, compute
from spmd_tx.coordinator.scheduler.request_table import Danger, RequestTable
from spmd_tx.coordinator.storage.database import open_database
from spmd_tx.demo import tiny_model
from tests.coordinator.conftest import run_queue
from tests.coordinator.recovery.generations import next_generation
from tests.coordinator.server import serve_with_poison
from tests.coordinator.server.test_serve import Running, serving
from tests.coordinator.training.bench import running

A, B = "alice:train:0", "bob:train:0"
SOME_ID, OTHER_ID = "a" * 32, "b" * 32

# --- marks --------------------------------------------------------------------------------------------


def found(path):
    """What a process sees that starts now."""
    copy = path.with_suffix(".copy")
    copy.write_bytes(path.read_bytes())
    return set(AtWork(copy).left_behind)


def test_a_mark_stands_while_its_block_runs_and_outlives_the_process(tmp_path):
    at_work = AtWork(tmp_path / "at_work")
    with at_work.on(SOME_ID):
        with at_work.on(OTHER_ID):
            assert found(tmp_path / "at_work") == {SOME_ID, OTHER_ID}
        assert found(tmp_path / "at_work") == {SOME_ID}
    assert found(tmp_path / "at_work") == set()


def test_a_new_process_begins_without_marks(tmp_path):
    AtWork(tmp_path / "at_work").on(SOME_ID).__enter__()
    assert AtWork(tmp_path / "at_work").left_behind == {SOME_ID}
    assert AtWork(tmp_path / "at_work").left_behind == frozenset()


def test_a_file_of_anything_else_marks_nothing(tmp_path):
    (tmp_path / "at_work").write_bytes(b"\xff" * 100 + SOME_ID.encode())
    assert AtWork(tmp_path / "at_work").left_behind == frozenset()


def test_more_marks_than_there_is_room_for_do_no_harm(tmp_path):
    at_work = AtWork(tmp_path / "at_work")
    marks = [at_work.on(f"{number:032x}") for number in range(SLOTS + 5)]
    for mark in marks:
        mark.__enter__()
    assert len(found(tmp_path / "at_work")) == SLOTS
    for mark in marks:
        mark.__exit__()
    assert found(tmp_path / "at_work") == set()


async def test_what_waits_has_no_mark_and_what_computes_has_one_in_threads_too(tmp_path):
    at_work, path = AtWork(tmp_path / "at_work"), tmp_path / "at_work"
    seen, going_on, raised = [], asyncio.Event(), []

    async def work():
        seen.append(found(path))
        await going_on.wait()
        seen.append(found(path))
        seen.append(await compute(SMALL_BYTES, found, path))
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raised.append(found(path))
            raise
        return seen

    task = asyncio.create_task(at_work.during(SOME_ID, work))
    while not seen:
        await asyncio.sleep(0)
    assert found(path) == set()
    going_on.set()
    while len(seen) < 3:
        await asyncio.sleep(0.001)
    assert found(path) == set()
    assert seen == [{SOME_ID}] * 3
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert raised == [{SOME_ID}]
    assert found(path) == set()


@pytest.mark.parametrize("outcome", [5, ZeroDivisionError()])
async def test_marked_work_gives_what_it_gives_without(outcome):
    async def work():
        await asyncio.sleep(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    settled = await asyncio.gather(AtWork().during(SOME_ID, work), return_exceptions=True)
    assert settled == [outcome]


async def test_while_there_are_suspects_one_thing_at_a_time_is_done(monkeypatch):
    monkeypatch.setattr(threads, "_threads", object())
    requests = [
        Request(number, id, "sample", "a", number, "a") for number, id in enumerate([SOME_ID, OTHER_ID])
    ]
    table = RequestTable(Quarantine(ends={OTHER_ID: 1}), requests)
    table.start_generation(again=[])
    assert await table.mark(SOME_ID, lambda: compute(SMALL_BYTES, max, 1, 2)) == 2
    table.remove(OTHER_ID)
    with pytest.raises(AttributeError):  # it looks for a thread
        await table.mark(SOME_ID, lambda: compute(SMALL_BYTES, max, 1, 2))


# --- counting -----------------------------------------------------------------------------------------


async def submitted(queue, seq_id):
    return await queue.submit("optim_step", A, seq_id, "alice", b"{}")


async def test_ends_are_counted_of_requests_that_may_be_begun_again(database, tmp_path):
    async with run_queue(database, tmp_path) as queue:
        open_one, executed, failed = [await submitted(queue, seq_id) for seq_id in (1, 2, 3)]
        queue.resolve(executed, Finished("x", b"y"))
        queue.resolve(failed, Failed("no", "user"))
        await queue.flush()
    for times in (1, 2):
        at_work = AtWork(tmp_path / "at_work")
        for request_id in (open_one, executed, failed, SOME_ID):
            at_work.on(request_id).__enter__()
        quarantine = await open_quarantine(database, tmp_path)
        assert quarantine.ends == {open_one: times, executed: times}
    assert (await open_quarantine(database, tmp_path)).ends == {open_one: 2, executed: 2}
    async with run_queue(database, tmp_path) as queue:  # that it is carried out once acquits it
        queue.resolve(open_one, Finished("x", b"y"))
        await queue.flush()
    assert (await open_quarantine(database, tmp_path)).ends == {executed: 2}


def test_one_end_is_suspicious_and_two_are_a_verdict():
    quarantine = Quarantine(ends={SOME_ID: 1, OTHER_ID: 2})
    assert quarantine.verdict(SOME_ID) is None
    assert quarantine.verdict("another") is None
    assert "the server ended twice while it was working" in quarantine.verdict(OTHER_ID).error
    assert [quarantine.is_suspect(id) for id in (SOME_ID, OTHER_ID, "another")] == [True, False, False]


async def test_a_model_is_refused_whose_request_ends_the_server_when_it_is_run_again(tmp_path):
    async with running(tmp_path, slots=3) as bench:
        for model in (A, B):
            await bench.result(bench.create(model))
        trained = bench.step(A, 1)
        await bench.result(trained)
        bench.scheduler._beyond_repair.update(Quarantine(ends={trained: 2}).beyond_repair())
        await next_generation(bench)
        assert "the server ended twice" in await bench.failure(bench.train(A, 2, 10))
        await bench.result(bench.train(B, 1, 10))


async def test_a_suspect_that_does_no_harm_is_none_any_more(tmp_path):
    async with running(tmp_path, slots=3) as bench:
        await bench.result(bench.create(A))
        stepped = bench.step(A, 1)
        await bench.result(stepped)
        bench.scheduler.quarantine.ends = {stepped: 1}
        await next_generation(bench)
        table = bench.scheduler._table
        await bench.result(bench.step(A, 2))
        await bench.until(lambda: not table.in_danger_of(Danger.SERVER))


# --- a real process -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("model"))


def step(server, model_id, seq_id, learning_rate, timeout=60):
    """The same request again has the same id."""
    adam = {"learning_rate": learning_rate, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    body = {"model_id": model_id, "seq_id": seq_id, "adam_params": adam}
    return server.client.post("optim_step", json=body, timeout=timeout).json()["request_id"]


def wait_for_end(server: Running, path):
    """Until the server is gone; one that stands at its work is killed as a probe of liveness does it."""
    while server.process.poll() is None:
        if found(path):
            time.sleep(0.3)
            if found(path):
                server.process.kill()
        time.sleep(0.05)
    server.process.wait()


@pytest.mark.parametrize("way", ["EXIT", pytest.param("FREEZE", marks=pytest.mark.slow)])
def test_a_request_that_ends_the_server_twice_is_given_up_and_the_next_start_goes_on(
    model_dir, tmp_path, way, monkeypatch
):
    monkeypatch.setattr("tests.coordinator.server.test_serve.MAIN", serve_with_poison.main)
    marks = tmp_path / "at_work"
    with serving(model_dir, tmp_path) as server:
        server.wait_until_ready()
        session_id = server.session()
        for number in (0, 1):
            server.retrieve(server.create_model(session_id, number, seed=5)).raise_for_status()
        poisoned, innocent = (f"{session_id}:train:{number}" for number in (0, 1))
        steps = (poisoned, getattr(serve_with_poison, way)), (innocent, 1e-4)
        for model_id, learning_rate in steps:
            with contextlib.suppress(httpx.TransportError):  # it is in the log all the same
                step(server, model_id, 1, learning_rate, timeout=3)
        wait_for_end(server, marks)
    with serving(model_dir, tmp_path) as server:
        server.wait_until_ready()  # the marks that are found now are new ones
        wait_for_end(server, marks)
    with serving(model_dir, tmp_path) as server:
        server.wait_until_ready()
        deadly, harmless = (step(server, model_id, 1, learning_rate) for model_id, learning_rate in steps)
        answer = server.retrieve(deadly).json()
        assert answer["category"] == "server"
        assert "the server ended twice while it was working on this request" in answer["error"]
        assert "metrics" in server.retrieve(harmless).json()
        assert "metrics" in server.retrieve(step(server, poisoned, 2, 1e-4)).json()
        assert server.terminate() == 0
    assert found(marks) == set()
    assert asyncio.run(ends_in(tmp_path)) == {}


async def ends_in(data_dir):
    database = await open_database(None, data_dir)
    try:
        return (await open_quarantine(database, data_dir)).ends
    finally:
        await database.close()
