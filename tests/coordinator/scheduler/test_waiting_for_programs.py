"""Nobody waits for anybody's compilation: a command goes out once its program is ready, and others go on."""

import asyncio

import numpy as np
import pytest

from spmd_tx.coordinator.sampling.batch import SampleBatch
from spmd_tx.coordinator.sampling.new_job import SamplingModel, draw_seeds
from spmd_tx.coordinator.sampling.shapes import SamplingLimits, SamplingShapes
from spmd_tx.coordinator.wire import tinker_pb2
from spmd_tx.coordinator.wire.sampling import ModelInput, ModelInputChunk, SampleRequest, SamplingParams
from spmd_tx.errors import WorkerLost
from spmd_tx.protocol.commands import ForwardBackward
from spmd_tx.protocol.programs import ProgramShape
from tests.coordinator.mesh.compiling_workers import CompilingWorkers, program_of
from tests.coordinator.sampling.bench import MAX_CONTEXT, MODEL, PAGE_SIZE, Words, prompt_of
from tests.coordinator.sampling.fake_device import BASE, FakeDevice, continuation
from tests.coordinator.scheduler.test_training_beside_sampling import CLIENTS, PAGES, train_and_sample
from tests.coordinator.training.bench import BASE_MODEL, logprobs, running

ALICE, BOB = "alice:train:0", "bob:train:0"
LONG = 200  # tokens: of a row that nobody else has


def is_new(program):
    """What only the requests of this size need."""
    return program.step in ("forward", "forward_backward") and program.row_length >= LONG


def sample_batch(bank, orders):
    limits = SamplingLimits(
        shapes=SamplingShapes(2, MAX_CONTEXT, PAGE_SIZE, decode_rows=4), pages_per_shard=PAGES, decode_steps=4
    )
    return SampleBatch(SamplingModel(MODEL, MAX_CONTEXT, Words()), bank, limits, programs=orders)


@pytest.fixture
def workers():
    return CompilingWorkers(FakeDevice(shards=2, pages=PAGES, page_size=PAGE_SIZE))


@pytest.fixture
async def bench(tmp_path, workers):
    async with running(tmp_path, sampling=sample_batch, workers=workers) as bench:
        yield bench


def status(bench, request_id):
    return bench.scheduler.status(request_id)


async def sample(bench, session, number=0, **fields):
    """A request to the base model."""
    sampler = await bench.catalog.add_sampler(session, 9, BASE_MODEL)
    body = SampleRequest(
        ModelInput([ModelInputChunk(tokens=prompt_of(5))]),
        SamplingParams(max_tokens=6, seed=number),
        sampling_session_id=sampler.id,
        **fields,
    )
    return bench.submit("sample", sampler.id, number, body)


async def warm(bench):
    """Have compiled what usual requests need."""
    await train_and_sample(bench, "carol")
    await bench.until(lambda: not bench.workers.held)


async def tokens(bench, request_id):
    response = tinker_pb2.SampleResponse.FromString((await bench.outcome(request_id)).body)
    return [np.frombuffer(each.tokens, np.int32).tolist() for each in response.sequences]


def of_base(number):
    return [continuation(BASE, prompt_of(5), draw_seeds(number, "", 0), 6)[0]]


async def test_many_clients_do_everything_and_no_command_ever_waits_for_its_program(bench, workers):
    alone = await train_and_sample(bench, "carol")
    await asyncio.gather(*(train_and_sample(bench, each) for each in CLIENTS))
    assert alone.keys()
    assert {program_of(command) for command in workers.commands} - {None} <= workers.compiled


async def test_others_train_and_sample_while_a_program_is_compiled(bench, workers):
    await warm(bench)
    workers.holds = is_new
    await bench.result(bench.create(BOB))
    waiting = bench.train(BOB, 1, LONG)
    stepped = bench.step(BOB, 2)
    await bench.until(lambda: workers.held)
    await train_and_sample(bench, "alice")
    assert status(bench, waiting).queue_state == "paused_capacity"
    assert status(bench, waiting).reason == (
        "waiting for its program: compiling a training step of 2 x 256 tokens"
    )
    assert {waiting, stepped}.isdisjoint(bench.log.outcomes)
    workers.let_go()
    (values,) = logprobs(await bench.result(waiting))
    assert len(values) == LONG
    await bench.result(stepped)


async def test_the_request_that_waited_gets_what_it_would_have_got_in_peace(bench, workers):
    await bench.result(bench.create(BOB))
    in_peace = await bench.result(bench.train(BOB, 1, 40, 60))
    workers.holds = lambda program: program.step == "optim_step"
    held = bench.step(BOB, 2)
    later = bench.train(BOB, 3, 40, 60)
    await bench.until(lambda: workers.held)
    assert status(bench, held).reason == "waiting for its program: compiling optim_step"
    workers.let_go()
    await bench.result(held)
    assert logprobs(await bench.result(later))[0].tolist() == logprobs(in_peace)[0].tolist()


async def test_a_request_begins_when_all_of_its_programs_are_ready(bench, workers):
    large, small = [ProgramShape(step="forward_backward", rows=rows, row_length=256) for rows in (16, 2)]
    workers.holds = lambda program: program == small
    await bench.result(bench.create(BOB))
    several = bench.train(BOB, 1, *[250] * 17)
    await bench.until(lambda: small in workers.held)
    assert large in workers.compiled
    assert not any(isinstance(command, ForwardBackward) for command in workers.commands)
    workers.let_go()
    await bench.result(several)


async def test_a_program_that_cannot_be_compiled_is_the_problem_of_those_who_want_it(bench, workers):
    broken = ProgramShape(step="forward", rows=2, row_length=256)
    workers.errors[broken] = "RuntimeError: no such instruction"
    for model in (ALICE, BOB):
        await bench.result(bench.create(model))
    refused = bench.train(BOB, 1, LONG, kind="forward")
    after = bench.train(BOB, 2, 40)
    assert await bench.failure(refused, "server") == (
        "the server cannot compile the program of this request (forward 2x256): "
        "RuntimeError: no such instruction"
    )
    await bench.result(after)
    await bench.result(bench.train(ALICE, 1, 40))
    del workers.errors[broken]
    await bench.result(bench.train(BOB, 3, LONG, kind="forward"))


async def test_a_model_whose_creation_cannot_be_compiled_is_never_trained(bench, workers):
    workers.errors[ProgramShape(step="create_adapter")] = "RESOURCE_EXHAUSTED: out of memory"
    created = bench.create(BOB)
    assert "A device has no memory left" in await bench.failure(created, "server")
    assert "has no weights" in await bench.failure(bench.train(BOB, 1, 40))
    assert workers.commands == []


async def test_a_slot_of_a_model_that_waits_for_its_program_is_given_to_others(bench, workers):
    """There are two slots, and two models in them that wait."""
    waiting = []
    for model in (BOB, "bob:train:1"):
        await bench.result(bench.create(model))
    workers.holds = is_new
    for model in (BOB, "bob:train:1"):
        waiting.append(bench.train(model, 1, LONG))
    await bench.until(lambda: workers.held)
    await bench.result(bench.create(ALICE))
    await bench.result(bench.train(ALICE, 1, 40))
    assert any(command.name == "swap_out" for command in workers.commands)
    workers.let_go()
    for each in waiting:
        await bench.result(each)
    assert any(command.name == "swap_in" for command in workers.commands)


async def test_samples_of_others_go_on_while_a_rare_kind_waits_for_its_program(bench, workers):
    await warm(bench)
    workers.holds = lambda program: program.top > 0
    rare = await sample(bench, "bob", topk_sample_logprobs=3)
    behind = await sample(bench, "bob", 1)
    await bench.until(lambda: workers.held)
    common = [await sample(bench, "alice", number) for number in range(3)]
    assert [await tokens(bench, each) for each in common] == [of_base(number) for number in range(3)]
    assert await tokens(bench, behind) == of_base(1)
    assert status(bench, rare).queue_state == "paused_capacity"
    assert status(bench, rare).reason == "waiting for its program: compiling a decode step"
    workers.let_go()
    assert await tokens(bench, rare) == of_base(0)


async def test_a_sample_whose_program_cannot_be_compiled_fails_and_no_other_one(bench, workers):
    await warm(bench)
    workers.holds = lambda program: program.draws > 0
    rare = await sample(bench, "bob", prompt_alt_tokens_k=2)
    await bench.until(lambda: workers.held)
    (program,) = workers.held
    workers.errors[program] = "RuntimeError: no such instruction"
    common = await sample(bench, "alice", 1)
    workers.let_go()
    assert f"cannot compile the program of this request ({program})" in await bench.failure(rare, "server")
    assert await tokens(bench, common) == of_base(1)


async def test_only_those_who_wait_for_a_program_are_blamed_when_it_ends_the_workers(bench, workers):
    workers.holds = is_new
    for model in (ALICE, BOB):
        await bench.result(bench.create(model))
    waiting = bench.train(BOB, 1, LONG)
    await bench.until(lambda: workers.held)
    dispatcher = bench.scheduler._execution._dispatcher
    assert dispatcher.in_flight == {waiting}
    (answer,) = workers.held.values()
    answer.set_exception(WorkerLost("forward_backward 2x256 was not compiled in time", by_command=True))
    with pytest.raises(WorkerLost):
        await bench.run
    assert bench.scheduler._remains.blamed == {waiting}


async def test_a_suspect_has_its_program_compiled_with_no_command_beside_it(bench, workers):
    await test_only_those_who_wait_for_a_program_are_blamed_when_it_ends_the_workers(bench, workers)
    workers.held.clear()
    workers.compiled.clear()
    workers.commands.clear()
    (suspect,) = bench.scheduler._remains.blamed
    await bench.start()
    await bench.until(lambda: any(map(is_new, workers.held)))
    other = bench.train(ALICE, 1, 40)
    await bench.prepared(ALICE)
    sent = len(workers.commands)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(workers.commands) == sent
    workers.let_go()
    await bench.result(suspect)
    await bench.result(other)
