"""Requests that the operator has given up: before their turn, too late, without workers, when run again."""

import asyncio

import pytest
from sqlalchemy import select, update

from spmd_tx.coordinator.requests import overview
from spmd_tx.coordinator.requests.given_up import GivenUpWatcher
from spmd_tx.coordinator.requests.records import Failed, Finished
from spmd_tx.coordinator.storage.database import in_database
from spmd_tx.coordinator.storage.tables import AuditRow, RequestRow, SessionRow
from spmd_tx.protocol.commands import ForwardBackward, OptimStep
from tests.coordinator.recovery.generations import next_generation
from tests.coordinator.scheduler.fake_sampling import FakeSampling, sample
from tests.coordinator.server.test_serve import model_dir as model_dir  # a fixture
from tests.coordinator.server.test_serve import serving
from tests.coordinator.training.bench import running
from tests.support.forked import Forked, run_spmd_tx

A, B = "alice:train:0", "bob:train:0"
WHY = "it was a mistake"
TOLD = f"given up by the operator: {WHY}"
RESULT = Finished("application/json", b"{}")


@pytest.fixture
def sampling():
    return FakeSampling()


@pytest.fixture
async def bench(tmp_path):
    async with running(tmp_path, slots=3) as bench:
        yield bench


# --- what the scheduler does ----------------------------------------------------------------------------


async def test_what_waits_behind_a_gap_fails_at_once_and_the_line_goes_on_without_it(bench, caplog):
    await bench.result(bench.create(A))
    stuck = bench.train(A, 2, 10)
    assert bench.scheduler.give_up(stuck, WHY)
    assert await bench.failure(stuck, "server") == TOLD
    assert f"forward_backward 2 of {A} is {TOLD}" in caplog.text
    bench.train(A, 1, 10)
    await bench.result(bench.step(A, 3))
    assert len(bench.workers.sent(ForwardBackward)) == 1


async def test_what_is_next_in_line_is_never_begun(bench):
    bench.create(A)
    seq_id = await bench.hold(A, 1)
    for number in range(8):
        bench.train(A, seq_id + number, 10)
    await bench.prepared(A, 4)
    last = list(bench.log.requests)[-1]
    assert bench.scheduler.give_up(last, WHY)
    bench.let_go()
    await bench.result(bench.step(A, seq_id + 8))
    assert await bench.failure(last, "server") == TOLD
    assert len(bench.workers.sent(ForwardBackward)) == 7


async def test_what_is_ready_to_be_sent_is_taken_back(bench):
    bench.create(A, seed=5)
    seq_id = await bench.hold(A, 1)
    first, stepped, last = (
        bench.train(A, seq_id, 10),
        bench.step(A, seq_id + 1),
        bench.train(A, seq_id + 2, 20),
    )
    await bench.prepared(A, 3)
    for request_id in (first, stepped):
        assert bench.scheduler.give_up(request_id, WHY)
        assert await bench.failure(request_id, "server") == TOLD
    bench.let_go()
    await bench.result(last)
    assert len(bench.workers.sent(ForwardBackward)) == 1
    assert len(bench.workers.sent(OptimStep)) == 3  # those that held it up


async def test_what_has_begun_keeps_its_result(bench):
    await bench.result(bench.create(A))
    bench.workers.is_holding = True
    trained = bench.train(A, 1, 10)
    await bench.until(lambda: bench.workers.held)
    assert not bench.scheduler.give_up(trained, WHY)
    bench.let_go()
    await bench.result(trained)
    assert bench.scheduler.give_up(trained, WHY)  # nothing is left to be done


async def test_what_has_begun_fails_when_the_workers_are_lost_and_is_not_begun_again(bench):
    await bench.result(bench.create(A, seed=5))
    bench.workers.is_holding = True
    trained = bench.train(A, 1, 10)
    await bench.until(lambda: bench.workers.held)
    bench.log.resignations[trained] = WHY
    await next_generation(bench)
    assert await bench.failure(trained, "server") == TOLD
    await bench.result(bench.step(A, 2, learning_rate=1.0))
    assert bench.workers.sent(ForwardBackward) == []
    assert bench.workers.weights == {0: 5.0}


async def test_a_suspect_that_was_given_up_brings_no_other_workers_down(bench):
    await bench.result(bench.create(A))
    bench.workers.is_holding = True
    poison = bench.train(A, 1, 10)
    await bench.until(lambda: bench.workers.held)
    bench.log.resignations[poison] = WHY
    await next_generation(bench, by_command=True)
    assert await bench.failure(poison, "server") == TOLD
    await bench.result(bench.create(B))
    assert not bench.scheduler._table.has_suspects


async def test_a_model_that_was_given_up_before_it_was_made_says_why(bench):
    bench.create(B)
    await bench.hold(B, 1)
    creation, waiting = bench.create(A), bench.step(A, 1)
    assert bench.scheduler.give_up(creation, WHY)
    bench.let_go()
    assert f"{A} was not created: {TOLD}" in await bench.failure(waiting)


@pytest.mark.parametrize("ahead", [8, 3], ids=["before its turn", "ready to be sent"])
async def test_an_answer_that_others_were_built_on_cannot_be_left_out(bench, ahead):
    """The step's result was stored before that of the gradients it used, and the workers were lost then."""
    await bench.result(bench.create(A))
    trained = [bench.train(A, seq_id, 10) for seq_id in range(1, ahead + 2)][-1]
    bench.step(A, ahead + 2, learning_rate=0.5)
    await bench.settled()
    bench.log.outcomes.pop(trained)
    bench.log.order.remove(trained)
    bench.log._settled[trained].clear()
    bench.scheduler._table.add(bench.log.requests[trained])
    await next_generation(bench, holds=("create_adapter", ForwardBackward))
    await bench.prepared(A, min(4, ahead))
    assert bench.scheduler.give_up(trained, WHY)
    bench.workers.holds = ()
    bench.let_go()
    assert await bench.failure(trained, "server") == TOLD
    message = await bench.failure(bench.step(A, ahead + 3))
    assert message == f"{A} cannot be restored: request {ahead + 1} is not run again, it was {TOLD}"


async def test_a_sample_is_cancelled_wherever_it_is(tmp_path, sampling):
    async with running(tmp_path, sampling=sampling) as bench:
        await bench.result(bench.create(A))
        bench.workers.is_holding = True
        sampled = await sample(bench)
        await bench.until(lambda: bench.workers.held)
        assert bench.scheduler.give_up(sampled, WHY)
        assert await bench.failure(sampled, "server") == TOLD


async def test_without_workers_a_request_fails_at_once(bench):
    await bench.result(bench.create(A))
    await bench.until(lambda: not bench.workers.held)
    bench.run.cancel()
    await asyncio.wait([bench.run])
    waiting = bench.train(A, 1, 10)
    assert bench.scheduler.give_up(waiting, WHY)
    assert bench.log.outcomes[waiting] == Failed(TOLD, "server")


# --- what is in the log ---------------------------------------------------------------------------------


async def add(queue, seq_id, kind="forward_backward"):
    return await queue.submit(kind, A, seq_id, "alice", b"{}")


async def finish(queue, request_id, outcome=RESULT):
    queue.resolve(request_id, outcome)
    await queue.stored([request_id])


async def set_column(database, request_id, **values):
    async with database.transaction() as db:
        await db.execute(update(RequestRow).where(RequestRow.id == request_id).values(**values))


async def give_up(database, request_id):
    async with database.transaction() as db:
        return await overview.give_up(db, await overview.find(db, request_id), WHY)


async def test_the_log_tells_which_unfinished_requests_were_given_up(queue, database):
    creation, trained = await add(queue, 0, "create_model"), await add(queue, 1)
    assert await queue.given_up() == {}
    assert await give_up(database, trained)
    await finish(queue, creation)
    assert not await give_up(database, creation)
    assert await queue.given_up() == {trained: WHY}
    await finish(queue, trained, Failed(TOLD, "server"))
    assert await queue.given_up() == {}
    history = await queue.history(A, after=-1)
    assert (history.closed, history.refusal) == ({1}, None)


async def test_a_model_is_refused_when_its_later_requests_were_built_on_one_that_was_given_up(
    queue, database
):
    creation, trained, stepped = [
        await add(queue, 0, "create_model"),
        await add(queue, 1),
        await add(queue, 2),
    ]
    for request_id in (creation, stepped):
        await finish(queue, request_id)
    await give_up(database, trained)
    await finish(queue, trained, Failed(TOLD, "server"))
    expected = f"{A} cannot be restored: request 1 is not run again, it was {TOLD}"
    assert (await queue.history(A, after=-1)).refusal == expected
    assert (await queue.history(A, after=1)).refusal is None  # a snapshot has it


async def test_what_was_executed_after_a_request_was_given_up_stays(queue, database):
    creation, trained = await add(queue, 0, "create_model"), await add(queue, 1)
    await finish(queue, creation)
    await give_up(database, trained)
    await finish(queue, trained, Failed(TOLD, "server"))
    await finish(queue, await add(queue, 2, "optim_step"))
    assert (await queue.history(A, after=-1)).refusal is None


async def test_a_request_whose_result_came_all_the_same_is_run_again(queue, database):
    creation, trained = await add(queue, 0, "create_model"), await add(queue, 1)
    await give_up(database, trained)
    for request_id in (creation, trained):
        await finish(queue, request_id)
    history = await queue.history(A, after=-1)
    assert ([each.request.id for each in history.executed], history.refusal) == ([creation, trained], None)


async def test_a_model_is_refused_rather_than_a_request_run_again(queue, database):
    creation, trained = await add(queue, 0, "create_model"), await add(queue, 1)
    for request_id in (creation, trained):
        await finish(queue, request_id)
    async with database.transaction() as db:
        await overview.refuse_model(db, await overview.find(db, trained), WHY)
    expected = f"{A} cannot be restored: request 1 is not run again, it was {TOLD}"
    assert (await queue.history(A, after=-1)).refusal == expected


async def test_an_operator_looks_in_and_gives_up_beside_a_queue_that_writes(queue, database_url, tmp_path):
    ids = [await add(queue, seq_id) for seq_id in (1, 2, 3)]
    await finish(queue, ids[2])

    async def read(db):
        return await overview.listed(db, None, None, most=1)

    async def write(db):
        return await overview.give_up(db, await overview.find(db, ids[1][:8]), WHY)

    found, count = await in_database(database_url, tmp_path, read, only_reads=True)
    assert ([each.row.id for each in found], count) == (ids[:1], 2)
    assert await in_database(database_url, tmp_path, write)
    assert await queue.given_up() == {ids[1]: WHY}


class Told:
    """A scheduler that has begun with some."""

    def __init__(self, begun):
        self.begun = begun
        self.heard = []

    def give_up(self, request_id, why):
        self.heard.append((request_id, why))
        return request_id not in self.begun


async def test_wishes_are_passed_on_and_who_comes_too_late_is_told_so_once(queue, database, caplog):
    async with database.transaction() as db:
        db.add(SessionRow(id="alice", created_at=1.0, tags=[], owner="alice"))
    in_time, late = await add(queue, 1), await add(queue, 2)
    scheduler = Told({late})
    watcher = GivenUpWatcher(database, queue, scheduler.give_up)
    await watcher.look()
    assert scheduler.heard == []
    for request_id in (in_time, late):
        await give_up(database, request_id)
    await watcher.look()
    await watcher.look()
    assert scheduler.heard[:2] == [(in_time, WHY), (late, WHY)]
    assert caplog.text.count(f"request {late} was given up by the operator, but has begun") == 1
    async with database.reading() as db:
        entries = (await db.scalars(select(AuditRow).order_by(AuditRow.number))).all()
    assert [(each.event, each.owner, each.details["request_id"]) for each in entries] == [
        ("request_given_up", "alice", in_time),
        ("request_given_up", "alice", late),
        ("request_give_up_late", "alice", late),
    ]


# --- what a server does ---------------------------------------------------------------------------------


def fail_from_outside(data_dir, request_id, *options):
    command = ("requests", "fail", request_id, "--yes", "--reason", WHY, "--data-dir", str(data_dir))
    with Forked(run_spmd_tx, *command, *options) as process:
        _, said = process.communicate(timeout=60)
        assert process.returncode == 0, said


def train(server, model_id, seq_id):
    data = [
        {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            "loss_fn_inputs": {
                "target_tokens": {"data": [2, 3, 4], "dtype": "int64", "shape": [3]},
                "weights": {"data": [1.0, 1.0, 1.0], "dtype": "float32", "shape": [3]},
            },
        }
    ]
    body = {"data": data, "loss_fn": "cross_entropy"}
    return server.post("forward_backward", model_id=model_id, seq_id=seq_id, forward_backward_input=body)[
        "request_id"
    ]


def test_a_model_is_given_up_for_a_request_that_must_not_be_run_again(model_dir, tmp_path):
    with serving(model_dir, tmp_path) as server:
        server.wait_until_ready()
        session_id = server.session()
        models = [
            server.retrieve(server.create_model(session_id, number, seed=5)).json()["model_id"]
            for number in range(2)
        ]
        trained = [train(server, model_id, 1) for model_id in models]
        for request_id in trained:
            server.retrieve(request_id).raise_for_status()
        server.process.kill()
        server.end()
    fail_from_outside(tmp_path, trained[0], "--refuse-model")
    with serving(model_dir, tmp_path) as server:
        server.wait_until_ready()
        refused = server.retrieve(train(server, models[0], 2)).json()
        assert refused["error"] == (
            f"{models[0]} cannot be restored: request 1 is not run again, it was {TOLD}"
        )
        answer = server.retrieve(train(server, models[1], 2))
        assert answer.headers["content-type"] == "application/x-protobuf"
        assert server.retrieve(trained[0]).headers["content-type"] == "application/x-protobuf"


def test_a_stuck_request_is_failed_while_the_server_runs_and_on_a_stopped_one(model_dir, tmp_path):
    """Requests beyond a gap wait for a minute."""
    with serving(model_dir, tmp_path) as server:
        server.wait_until_ready()
        created = server.create_model(server.session(), 0, seed=5)
        model_id = server.retrieve(created).json()["model_id"]
        stuck, stuck_too, harmless = (train(server, model_id, seq_id) for seq_id in (3, 4, 5))
        fail_from_outside(tmp_path, stuck)
        answer = server.retrieve(stuck).json()
        assert (answer["category"], answer["error"]) == ("server", TOLD)
        server.process.kill()
        server.end()
    fail_from_outside(tmp_path, stuck_too)
    with serving(model_dir, tmp_path) as server:
        server.wait_until_ready()
        answer = server.retrieve(stuck_too).json()
        assert (answer["category"], answer["error"]) == ("server", TOLD)
        for seq_id in (1, 2):
            server.retrieve(train(server, model_id, seq_id)).raise_for_status()
        assert server.retrieve(harmless).headers["content-type"] == "application/x-protobuf"
        assert server.terminate() == 0
