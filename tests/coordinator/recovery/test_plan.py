import shutil

import numpy as np
import pytest

from spmd_tx.coordinator.scheduler import scheduler
from spmd_tx.coordinator.training import optimizers
from spmd_tx.errors import WorkerLost
from spmd_tx.protocol.commands import ForwardBackward, OptimStep
from tests.coordinator.recovery.generations import next_generation, train_for_a_while
from tests.coordinator.scheduler.fake_sampling import slots
from tests.coordinator.training.bench import logprobs
from tests.coordinator.training.fake_trainer import FakeTrainer

A, B = "alice:train:0", "bob:train:0"


# --- models -------------------------------------------------------------------------------------------


async def test_a_model_is_what_it_was_and_goes_on(bench):
    await bench.result(bench.create(A, seed=5))
    await train_for_a_while(bench, A)
    before, outcomes = bench.workers.weights[0], dict(bench.log.outcomes)
    await next_generation(bench)
    await bench.result(bench.train(A, 10, 5))
    assert bench.workers.weights == {0: before}
    assert {id: bench.log.outcomes[id] for id in outcomes} == outcomes
    assert len(bench.workers.sent(OptimStep)) == 3


async def test_requests_that_were_under_way_are_answered_and_count_once(bench):
    await bench.result(bench.create(A))
    await bench.settled()
    bench.workers.is_holding = True
    trained, stepped = bench.train(A, 1, 10), bench.step(A, 2, learning_rate=0.5)
    await bench.until(lambda: len(bench.workers.held) == 2)
    expected = bench.workers.weights[0]
    await next_generation(bench)
    assert logprobs(await bench.result(trained))[0].size == 10
    await bench.result(stepped)
    assert bench.workers.weights == {0: expected}


async def test_a_request_that_was_overtaken_by_its_successor_runs_between_them(bench):
    """The step's result was stored before that of the gradients it used."""
    await bench.result(bench.create(A))
    trained, stepped = bench.train(A, 1, 10), bench.step(A, 2, learning_rate=0.5)
    await bench.settled()
    expected = bench.workers.weights[0]
    outcome = bench.log.outcomes.pop(trained)
    bench.scheduler._table.add(bench.log.requests[trained])
    await next_generation(bench)
    await bench.until(lambda: trained in bench.log.outcomes)
    assert bench.log.outcomes[trained] == outcome
    await bench.result(bench.step(A, 3, learning_rate=0.0))
    assert bench.workers.weights == {0: expected}
    assert stepped in bench.log.outcomes


async def test_failed_requests_are_not_run_again_but_a_step_that_was_not_taken_is(bench):
    await bench.result(bench.create(A))
    await bench.failure(bench.train(A, 1, 10, token=5000))
    bench.train(A, 2, 10, token=2, loss_fn="importance_sampling", advantages=infinite(10))
    assert "not finite" in await bench.failure(bench.step(A, 3))
    bench.train(A, 4, 10)
    await bench.result(bench.step(A, 5, learning_rate=0.5))
    expected = bench.workers.weights[0]
    await next_generation(bench)
    await bench.result(bench.train(A, 6, 10))
    assert bench.workers.weights == {0: expected}


async def test_a_model_that_was_never_created_still_says_why(bench):
    await bench.failure(bench.create(A, rank=64))
    await next_generation(bench)
    assert "lora_config.rank is 64" in await bench.failure(bench.train(A, 1, 10))


async def test_a_model_accepted_while_workers_get_ready_is_created(bench, monkeypatch):
    """Its request is in the log already, and reaches the scheduler a moment later."""
    arrivals = []
    with monkeypatch.context() as patch:
        patch.setattr(bench.log, "_announce", arrivals.append)
        created = bench.create(A)
    await next_generation(bench)
    bench.scheduler.arrive(*arrivals)
    await bench.result(created)
    await bench.result(bench.train(A, 1, 10))


async def test_a_session_that_ends_while_its_models_are_planned_holds_no_slot(bench, monkeypatch):
    """On a server that trains all weights everyone would wait for it until the workers are lost again."""
    await bench.result(bench.create(A))
    await bench.result(bench.create(B))
    listed = bench.models.open_models

    async def open_models(others):
        models = await listed(others)
        bench.models.ended.add("alice")
        bench.scheduler.session_ended("alice")
        return models

    monkeypatch.setattr(bench.models, "open_models", open_models)
    await next_generation(bench)
    assert "because its session has ended" in await bench.failure(bench.train(A, 1, 10))
    await bench.result(bench.train(B, 1, 10))
    assert len(bench.workers.weights) == 1


async def test_a_result_that_differs_is_reported_and_the_stored_one_stays(bench, caplog):
    await bench.result(bench.create(A))
    trained = bench.train(A, 1, 10)
    stored = await bench.outcome(trained)
    bench.log.payloads[trained] = bench.log.payloads[bench.train(A, 2, 11)]
    await bench.settled()
    await next_generation(bench)
    await bench.result(bench.train(A, 3, 10))
    message = "forward_backward 1 of alice:train:0, run again, did not give the same result"
    await bench.until(lambda: message in caplog.text)
    assert bench.log.outcomes[trained] == stored


async def test_a_request_that_cannot_be_read_again_costs_its_model_only(bench, caplog):
    await bench.result(bench.create(A))
    await bench.result(bench.create(B))
    trained = bench.train(A, 1, 10)
    await bench.settled()
    bench.log.payloads[trained] = OSError("no such file")
    await next_generation(bench)
    assert "request 1 cannot be run again: no such file" in await bench.failure(bench.train(A, 2, 10))
    await bench.result(bench.train(B, 1, 10))


async def test_a_step_is_run_again_although_its_numbers_have_been_refused_since(bench, monkeypatch):
    await bench.result(bench.create(A))
    with monkeypatch.context() as earlier:
        earlier.setattr(optimizers, "_check", lambda field, params: None)
        bench.train(A, 1, 10)
        await bench.result(bench.step(A, 2, grad_clip_norm=1e-46))
    assert "grad_clip_norm is 1e-46" in await bench.failure(bench.step(A, 3, grad_clip_norm=1e-46))
    before = bench.workers.weights[0]
    await next_generation(bench)
    await bench.result(bench.train(A, 4, 10))
    assert bench.workers.weights[0] == before


async def test_a_load_that_is_run_again_waits_for_a_store_that_does_not_answer(bench, monkeypatch):
    monkeypatch.setattr("spmd_tx.coordinator.storage.outages.RETRY_SECONDS", 0.0)
    bench.create(A, seed=7)
    path = (await bench.result(bench.save(A, 1, "x")))["path"]
    bench.create(B, seed=8)
    await bench.result(bench.load(B, 1, path))
    shutil.rmtree(bench.directory / "snapshots")  # so that the load, too, is run again
    catalog = bench.checkpoints
    outages, opened = [ConnectionError("the store does not answer")] * 3, catalog.open

    async def open_when_it_answers(path, base):
        if outages:
            raise outages.pop()
        return await opened(path, base)

    monkeypatch.setattr(catalog, "open", open_when_it_answers)
    await next_generation(bench)
    await bench.result(bench.train(B, 2, 4))
    assert (outages, bench.workers.weights) == ([], {0: 7, 1: 7})


async def test_a_save_that_was_interrupted_may_overwrite_what_it_wrote(bench):
    await bench.result(bench.create(A))
    saved = bench.save(A, 1, "x")
    path = (await bench.result(saved))["path"]
    del bench.log.outcomes[saved]
    bench.log._settled[saved].clear()
    bench.scheduler._table.add(bench.log.requests[saved])
    await next_generation(bench)
    assert (await bench.result(saved))["path"] == path
    assert len(bench.workers.sent("save_state")) == 1
    assert "exists" in await bench.failure(bench.save(A, 2, "x"))


# --- quarantine ---------------------------------------------------------------------------------------


async def test_a_request_that_ends_two_generations_is_given_up_and_the_rest_go_on(bench):
    await bench.result(bench.create(A))
    await bench.result(bench.create(B))
    bench.workers.holds = ForwardBackward
    deadly, innocent = bench.train(A, 1, 10), bench.train(B, 1, 10)
    await bench.until(lambda: set().union(*map(slots, bench.workers.sent(ForwardBackward))) == {0, 1})
    await next_generation(bench, by_command=True, holds=ForwardBackward)
    await bench.until(lambda: bench.workers.held)
    if slots(bench.workers.commands[-1]) == {1}:  # it is seen to do no harm
        bench.workers.answer()
        await bench.until(lambda: bench.workers.held)
    await next_generation(bench, by_command=True)
    assert "the workers were lost 2 times" in await bench.failure(deadly, "server")
    await bench.result(innocent)
    await bench.result(bench.train(A, 2, 10))
    assert bench.log.losses_by_command[innocent] == 1


async def test_workers_killed_from_outside_cost_no_request(bench):
    await bench.result(bench.create(A))
    bench.workers.holds = ForwardBackward
    trained = bench.train(A, 1, 10)
    for holds in [ForwardBackward] * 5 + [()]:
        await bench.until(lambda: bench.workers.held)
        await next_generation(bench, holds=holds)
    await bench.result(trained)


async def test_workers_that_are_always_killed_at_the_same_request_give_it_up_in_the_end(bench, monkeypatch):
    monkeypatch.setattr(scheduler, "MOST_LOSSES", 3)
    await bench.result(bench.create(A))
    bench.workers.holds = ForwardBackward
    trained = bench.train(A, 1, 10)
    for _ in range(3):
        await bench.until(lambda: bench.workers.held)
        await next_generation(bench, holds=ForwardBackward)
    assert "the workers were lost 3 times" in await bench.failure(trained, "server")


# --- status -------------------------------------------------------------------------------------------


async def test_between_generations_a_request_is_paused_and_says_why(bench):
    await bench.result(bench.create(A))
    await bench.settled()
    bench.workers.is_holding = True
    trained = bench.train(A, 1, 10)
    await bench.until(lambda: bench.workers.held)
    bench.phase = "restarting the workers: worker 1 was killed by signal 9"
    bench.workers.die(WorkerLost("worker 1 was killed by signal 9"))
    with pytest.raises(WorkerLost):
        await bench.run
    status = bench.scheduler.status(trained)
    assert status.queue_state == "paused_capacity"
    assert status.reason == "restarting the workers: worker 1 was killed by signal 9"
    assert trained not in bench.log.outcomes
    later = bench.train(A, 2, 10)
    bench.workers = FakeTrainer()
    await bench.start()
    for request_id in (trained, later):
        await bench.result(request_id)


def infinite(length):
    return np.full(length, 3e38, np.float32)
