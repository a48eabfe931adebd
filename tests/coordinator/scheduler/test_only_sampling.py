"""Workers that only sample: models wait for those that train, and nothing else does."""

import asyncio

import pytest

from spmd_tx.coordinator.scheduler.queue_status import NOT_SAVED, NOT_TRAINED
from spmd_tx.coordinator.wire.sampling import ModelInput, ModelInputChunk, SampleRequest
from spmd_tx.protocol.commands import Decode, ForwardBackward, OptimStep
from tests.coordinator.scheduler.fake_sampling import sample
from tests.coordinator.training.fake_trainer import FakeTrainer

A, SAMPLER = "alice:train:0", "alice:sample:0"


async def restart(bench, *, trains):
    """Begin a generation with new workers."""
    bench.run.cancel()
    await asyncio.wait([bench.run])
    bench.workers, bench.trains = FakeTrainer(), trains
    await bench.start()


def ask(bench, seq_id):
    return bench.submit("sample", SAMPLER, seq_id, SampleRequest(ModelInput([ModelInputChunk(tokens=[1])])))


@pytest.fixture
async def trained(bench):
    """A model with a step, which no snapshot has."""
    bench.create(A)
    bench.train(A, 1, 10)
    await bench.result(bench.step(A, 2))
    return bench


async def test_models_wait_while_samples_are_drawn_and_go_on_afterwards(trained, sampling):
    bench = trained
    await restart(bench, trains=False)
    waiting = [bench.train(A, 3, 10), bench.step(A, 4)]
    created = bench.create("bob:train:0")
    await bench.outcome(await sample(bench))
    for request in (*waiting, created):
        status = bench.scheduler.status(request)
        assert (status.queue_state, status.reason) == ("paused_capacity", NOT_TRAINED)
    assert not bench.scheduler.has_unfinished  # that could be finished before the server ends
    assert {type(command) for command in bench.workers.commands} == {Decode}
    await restart(bench, trains=True)
    for request in (*waiting, created):
        await bench.result(request)
    kinds = [type(each) for each in bench.workers.commands if isinstance(each, ForwardBackward | OptimStep)]
    assert kinds == [ForwardBackward, OptimStep] * 2  # the step before is run again


@pytest.mark.parametrize("inflight", [False, True])
async def test_weights_that_no_file_has_are_waited_for(trained, sampling, inflight):
    bench = trained
    saved = bench.save_for_sampler(
        A, 3, sampling_session_seq_id=0, kind="inflight" if inflight else "snapshot"
    )
    await bench.result(saved)
    await restart(bench, trains=False)
    lost = ask(bench, 0)
    await bench.until(lambda: bench.scheduler.status(lost).reason is not None)
    status = bench.scheduler.status(lost)
    assert (status.queue_state, status.reason) == ("paused_capacity", NOT_SAVED)
    assert not bench.scheduler.has_unfinished
    await restart(bench, trains=True)
    await bench.outcome(lost)
    assert sampling.admitted[lost] == SAMPLER


async def test_a_request_that_waits_for_training_can_be_given_up(trained):
    bench = trained
    await restart(bench, trains=False)
    waiting, later = bench.train(A, 3, 10), bench.step(A, 4)
    assert bench.scheduler.give_up(waiting, "not needed")
    assert "not needed" in await bench.failure(waiting, "server")
    await restart(bench, trains=True)
    await bench.result(later)


async def test_what_an_ended_session_left_waiting_ends_with_it(trained):
    bench = trained
    await restart(bench, trains=False)
    waiting = bench.step(A, 3)
    bench.models.ended.add("alice")
    bench.scheduler.session_ended("alice")
    await restart(bench, trains=True)
    await bench.result(waiting)
