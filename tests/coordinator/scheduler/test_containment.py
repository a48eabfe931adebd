"""Errors that nobody foresaw, wherever they are raised: one request fails, and everything else goes on."""

import asyncio
import re

import pytest

from spmd_tx.coordinator.mesh import generations
from spmd_tx.coordinator.mesh.generations import Generations
from spmd_tx.coordinator.mesh.loss_causes import GenerationLoss, LossSign, Suspicion
from spmd_tx.coordinator.runtime import metrics
from spmd_tx.coordinator.sampling import job
from spmd_tx.coordinator.sampling.job import ChunkedPrefill
from spmd_tx.coordinator.training import execute, optimizers
from spmd_tx.coordinator.training.micro_batch import MicroBatch
from spmd_tx.coordinator.training.model import TrainedModel
from spmd_tx.coordinator.training.slots import TrainingSlots
from spmd_tx.errors import CrashLoop, MeshError, ServerFault
from spmd_tx.protocol.commands import OptimStep
from tests.coordinator.recovery.generations import next_generation, train_for_a_while
from tests.coordinator.sampling.bench import Bench, expected, prompt_of
from tests.coordinator.training.bench import running
from tests.coordinator.training.fake_trainer import FakeTrainer

A, B, C = "alice:train:0", "bob:train:0", "carol:train:0"


class Panic(BaseException):
    """As foreign code raises it that is written in Rust."""


@pytest.fixture
async def bench(tmp_path):
    async with running(tmp_path, slots=3) as bench:
        yield bench


def raising(original, is_meant, error=ZeroDivisionError):
    """The function, but that it raises for some arguments."""

    def function(*arguments, **named):
        if is_meant(*arguments):
            raise error("by a mistake of the service")
        return original(*arguments, **named)

    return function


def check_reported(caplog, text):
    number = re.search(r"internal error ([0-9a-f]{12}): ", text)[1]
    (record,) = [each for each in caplog.records if f"internal error {number}" in each.getMessage()]
    assert record.exc_info[1] is not None


# --- one request --------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ZeroDivisionError, RecursionError, MemoryError, Panic])
async def test_whatever_a_request_raises_fails_that_request(bench, monkeypatch, caplog, error):
    """Of all kinds of work: here it is the check of an optimizer step."""
    await bench.result(bench.create(A))
    await bench.result(bench.create(B))
    is_poisoned = lambda wish, _: wish.adam_params.learning_rate == 0.5  # noqa: E731
    monkeypatch.setattr(execute, "step_of", raising(execute.step_of, is_poisoned, error))
    poisoned, innocent = bench.step(A, 1, learning_rate=0.5), bench.step(B, 1)
    text = await bench.failure(poisoned, "server")
    check_reported(caplog, text)
    assert "its log has the details under this id" in text
    await bench.result(innocent)
    await bench.result(bench.train(A, 2, 10))


async def test_a_failed_request_is_not_part_of_what_is_run_again(bench, monkeypatch):
    await bench.result(bench.create(A))
    await train_for_a_while(bench, A)
    expected = dict(bench.workers.weights)
    monkeypatch.setattr(execute, "step_of", raising(execute.step_of, lambda *_: True))
    await bench.failure(bench.step(A, 10), "server")
    monkeypatch.undo()
    await next_generation(bench)
    await bench.result(bench.step(A, 11, learning_rate=0.0))
    assert bench.workers.weights == expected


async def test_a_model_that_could_not_be_created_says_so(bench, monkeypatch):
    monkeypatch.setattr(execute, "check_lora", raising(execute.check_lora, lambda *_: True))
    created, trained = bench.create(A), bench.train(A, 1, 10)
    assert "internal error" in await bench.failure(created, "server")
    assert "alice:train:0 was not created" in await bench.failure(trained)
    await next_generation(bench)
    assert "internal error" in await bench.failure(bench.train(A, 2, 10))


@pytest.mark.parametrize("outcome", ["outcome_of_step", "outcome_of_loss"])
async def test_what_was_carried_out_counts_though_its_result_cannot_be_made(
    bench, monkeypatch, caplog, outcome
):
    original = getattr(execute, outcome)

    async def mistaken(*arguments):
        await original(*arguments)
        raise ZeroDivisionError

    await bench.result(bench.create(A))
    monkeypatch.setattr(execute, outcome, mistaken)
    trained, stepped = bench.train(A, 1, 10, token=3), bench.step(A, 2, learning_rate=0.5)
    failed = {"outcome_of_loss": trained, "outcome_of_step": stepped}[outcome]
    text = await bench.failure(failed, "server")
    check_reported(caplog, text)
    assert "was carried out and counts" in text
    assert bench.log.outcomes[failed].executed
    await bench.settled()
    expected = dict(bench.workers.weights)
    for _ in range(2):  # and once when it can be made
        await next_generation(bench)
        await bench.until(lambda: not bench.scheduler._execution.lines[A].to_run_again)
        assert bench.workers.weights == expected
        monkeypatch.undo()
    assert "did not give the same result" not in caplog.text
    await bench.result(bench.step(A, 3))


async def test_a_model_with_half_of_a_request_is_not_used_until_it_is_restored(bench, monkeypatch, caplog):
    """As if there had been nothing of that request."""
    await bench.result(bench.create(A))
    await train_for_a_while(bench, A)
    expected = dict(bench.workers.weights)
    original = TrainedModel.put_chunks

    def put_chunks(model, chunks):
        original(model, chunks)
        raise ZeroDivisionError

    monkeypatch.setattr(TrainedModel, "put_chunks", put_chunks)
    await bench.failure(bench.train(A, 10, 10), "server")
    monkeypatch.undo()
    refusal = await bench.failure(bench.step(A, 11))
    assert "cannot be used before the workers are started again" in refusal
    await bench.scheduler.drain()  # takes no snapshot of it
    await next_generation(bench)
    await bench.result(bench.step(A, 12, learning_rate=0.0))
    assert bench.workers.weights == expected


async def test_background_work_that_fails_costs_nothing(bench, monkeypatch, caplog):
    async def mistaken(*_, **__):
        raise ZeroDivisionError

    await bench.result(bench.create(A))
    monkeypatch.setattr(bench.snapshots, "record", mistaken)
    monkeypatch.setattr(bench.snapshots, "is_due", lambda _: True)
    monkeypatch.setattr(bench.versions.inflight, "answered", raising(None, lambda *_: True))
    await bench.result(bench.step(A, 1))
    await bench.result(bench.save_for_sampler(A, 2, sampling_session_seq_id=1))
    await bench.until(lambda: caplog.text.count("internal error") >= 2)
    await bench.result(bench.step(A, 3))


# --- replays ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ZeroDivisionError, Panic])
async def test_a_request_that_raises_when_it_is_run_again_costs_its_model_only(
    bench, monkeypatch, caplog, error
):
    for model in (A, B):
        await bench.result(bench.create(model))
    await bench.result(bench.step(A, 1, learning_rate=0.5))
    await bench.result(bench.step(B, 1))
    is_poisoned = lambda *given: getattr(given[-1], "learning_rate", None) == 0.5  # noqa: E731
    poisoned = raising(execute.Training._optim_step, is_poisoned, error)
    monkeypatch.setattr(execute.Training, "_optim_step", poisoned)
    await next_generation(bench)
    refusal = await bench.failure(bench.train(A, 2, 10))
    assert "alice:train:0 cannot be restored" in refusal
    check_reported(caplog, refusal)
    await bench.result(bench.train(B, 2, 10))


async def test_a_model_whose_restoration_cannot_be_planned_costs_no_other(bench, monkeypatch, caplog):
    for model in (A, B):
        await bench.result(bench.create(model))
    original = bench.snapshots.newest

    async def newest(model_id, before):
        if model_id == A:
            raise ZeroDivisionError
        return await original(model_id, before)

    monkeypatch.setattr(bench.snapshots, "newest", newest)
    await next_generation(bench)
    refusal = await bench.failure(bench.train(A, 1, 10))
    check_reported(caplog, refusal)
    await bench.result(bench.train(B, 1, 10))


# --- what is done for many at once --------------------------------------------------------------------


async def until_it_ends(bench):
    """The generation ends; the next one is started."""
    with pytest.raises(MeshError) as end:
        await bench.run
    bench.workers = FakeTrainer()
    await bench.start()
    return end.value


async def check_that_only_this_fails(bench, caplog, failed, innocent):
    """And that the generation goes on: the error is reported, with its traceback."""
    check_reported(caplog, await bench.failure(failed, "server"))
    for request_id in innocent:
        await bench.result(request_id)
    assert not bench.run.done()


async def test_a_command_that_cannot_be_made_costs_its_request(bench, monkeypatch, caplog):
    def poisoned(**options):
        if options["learning_rate"] == 0.5:
            raise ZeroDivisionError
        return OptimStep(**options)

    for model in (A, B):
        await bench.result(bench.create(model))
    await bench.result(bench.train(A, 1, 10, token=3))
    monkeypatch.setattr(optimizers, "OptimStep", poisoned)
    deadly = bench.step(A, 2, learning_rate=0.5)
    innocent = [bench.train(B, 1, 10), bench.step(A, 3), bench.step(B, 2)]
    await check_that_only_this_fails(bench, caplog, deadly, innocent)
    assert not bench.log.outcomes[deadly].executed
    await bench.settled()
    expected = dict(bench.workers.weights)
    await next_generation(bench)
    await bench.result(bench.step(A, 4, learning_rate=0.0))
    assert bench.workers.weights == expected


async def test_an_error_in_planning_is_counted(bench, monkeypatch):
    await bench.result(bench.create(A))
    before = metrics.INTERNAL_ERRORS._value.get()
    monkeypatch.setattr(optimizers, "OptimStep", raising(OptimStep, lambda *_: True))
    await bench.failure(bench.step(A, 1), "server")
    assert metrics.INTERNAL_ERRORS._value.get() == before + 2  # it was tried again, alone


POISON = 66  # a token


def is_poisoned(batch, *_):
    return any((chunk.rows.tokens == POISON).any() for chunk in batch.chunks)


@pytest.mark.parametrize("part", ["rows", "loss", "join"])
async def test_of_chunks_that_share_a_command_only_the_guilty_one_fails(bench, monkeypatch, caplog, part):
    for model in (A, B, C):
        await bench.result(bench.create(model))
    is_meant = {"join": lambda _, chunk: (chunk.rows.tokens == POISON).any()}.get(part, is_poisoned)
    monkeypatch.setattr(MicroBatch, part, raising(getattr(MicroBatch, part), is_meant))
    innocent = [bench.train(B, 1, 10)]
    deadly = bench.train(A, 1, 10, token=POISON)
    innocent += [bench.train(C, 1, 10), bench.step(B, 2), bench.step(C, 2), bench.step(A, 2)]
    await check_that_only_this_fails(bench, caplog, deadly, innocent)


async def test_a_model_of_which_half_a_request_was_sent_is_refused_and_no_other(bench, monkeypatch, caplog):
    """No later request of it runs on that half, also one that has begun."""
    await bench.result(bench.create(A))
    await train_for_a_while(bench, A)
    expected = dict(bench.workers.weights)
    sent = []

    def rows(batch):
        sent.append(batch)
        if len(sent) > 1 and is_poisoned(batch):
            raise ZeroDivisionError
        return original(batch)

    original = MicroBatch.rows
    monkeypatch.setattr(MicroBatch, "rows", rows)
    deadly = bench.train(A, 10, *[250] * 20, token=POISON)
    behind = bench.step(A, 11, learning_rate=0.5)
    assert "internal error" in await bench.failure(deadly, "server")
    await bench.failure(behind, "server")
    monkeypatch.undo()
    assert "cannot be used before the workers are started again" in await bench.failure(bench.step(A, 12))
    await bench.result(bench.create(B))
    await bench.scheduler.drain()  # takes no snapshot of it
    await next_generation(bench)
    await bench.result(bench.step(A, 13, learning_rate=0.0))
    assert expected.items() <= bench.workers.weights.items()


async def test_a_model_that_cannot_be_seated_fails_alone(bench, monkeypatch, caplog):
    for model in (A, B):
        await bench.result(bench.create(model))
    is_of_a = lambda slots, model, *_: model.id == A  # noqa: E731
    monkeypatch.setattr(TrainingSlots, "seat", raising(TrainingSlots.seat, is_of_a))
    failed = bench.step(A, 1)
    await check_that_only_this_fails(bench, caplog, failed, [bench.step(B, 1)])


async def test_a_snapshot_that_cannot_be_planned_costs_nothing(bench, monkeypatch, caplog):
    await bench.result(bench.create(A))
    move = execute.Move

    def no_snapshot(**fields):
        if "in_background" in fields:
            raise ZeroDivisionError("by a mistake of the service")
        return move(**fields)

    monkeypatch.setattr(execute, "Move", no_snapshot)
    monkeypatch.setattr(bench.snapshots, "is_due", lambda _: True)
    await bench.result(bench.step(A, 1))
    await bench.until(lambda: "internal error" in caplog.text)
    await bench.result(bench.step(A, 2))


async def test_a_reply_that_cannot_be_taken_apart_costs_its_requests_their_results(
    bench, monkeypatch, caplog
):
    for model in (A, B):
        await bench.result(bench.create(model))
    is_meant = lambda batch, *_: is_poisoned(batch)  # noqa: E731
    monkeypatch.setattr(MicroBatch, "cut", raising(MicroBatch.cut, is_meant))
    failed = bench.train(A, 1, 10, token=POISON)
    text = await bench.failure(failed, "server")
    assert "was carried out and counts" in text
    await bench.result(bench.step(A, 2))
    await bench.result(bench.train(B, 1, 10))


@pytest.mark.parametrize("suspicion, loops", [(Suspicion.FAULT, False), (Suspicion.FOLLOWED, True)])
async def test_finding_the_guilty_is_no_crash_loop(monkeypatch, suspicion, loops):
    ended = iter(range(8))

    async def one(self, work):
        if next(ended) == 7:
            raise StopAsyncIteration
        return GenerationLoss(
            LossSign(suspicion, 0, "internal error", by_command=False), "internal error"
        ), False

    monkeypatch.setattr(Generations, "_run_one", one)
    monkeypatch.setattr(generations, "FIRST_DELAY", 0.0)
    run = object.__new__(Generations)
    run.may_be_killed = False
    with pytest.raises(CrashLoop if loops else StopAsyncIteration):
        await Generations.run(run, lambda ready: None)


@pytest.mark.parametrize("has_suspects, suspicion", [(True, Suspicion.FAULT), (False, Suspicion.FOLLOWED)])
async def test_a_fault_without_suspects_may_be_a_crash_loop(has_suspects, suspicion):
    living = asyncio.get_running_loop().create_future()
    living.set_exception(ServerFault("internal error", has_suspects))
    assert generations._of_work(living).suspicion == suspicion


# --- samples ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [ZeroDivisionError, Panic])
@pytest.mark.parametrize("part", ["result", "extend"])
def test_a_sample_whose_tokens_cannot_be_taken_fails_alone(monkeypatch, part, error):
    bench = Bench()
    prompts = {"good": prompt_of(9), "bad": prompt_of(9, 7), "fine": prompt_of(5, 3)}
    of = {"result": job.SampleJob, "extend": job.Sample}[part]
    is_bad = lambda each, *_: getattr(each, "job", each).request_id == "bad"  # noqa: E731
    monkeypatch.setattr(of, part, raising(getattr(of, part), is_bad, error))
    for name, tokens in prompts.items():
        bench.admit(name, tokens, max_tokens=12, num_samples=2)
    assert set(bench.run()) == {"good", "fine"}
    assert bench.failures["bad"].category == "server"
    for name in ("good", "fine"):
        assert bench.tokens(name) == [expected(name, prompts[name], 12, index=index)[0] for index in range(2)]


@pytest.mark.parametrize("error", [ZeroDivisionError, Panic])
def test_a_prompt_whose_scores_cannot_be_taken_fails_alone(monkeypatch, error):
    bench = Bench()
    is_bad = lambda each, *_: each.job.request_id == "bad"  # noqa: E731
    monkeypatch.setattr(ChunkedPrefill, "absorb", raising(ChunkedPrefill.absorb, is_bad, error))
    bench.admit("bad", prompt_of(20, 7), max_tokens=12, num_samples=2, prompt_logprobs=True)
    bench.admit("good", prompt_of(20), max_tokens=12, prompt_logprobs=True)
    assert set(bench.run()) == {"good"}
    assert bench.failures["bad"].category == "server"
    assert bench.tokens("good") == [expected("good", prompt_of(20), 12)[0]]
