import asyncio

import pytest

from spmd_tx.coordinator.requests.records import Finished
from spmd_tx.coordinator.runtime.folder_names import folder_name
from spmd_tx.coordinator.runtime.metrics import REGISTRY
from spmd_tx.coordinator.sampling.bank import BASE_MODEL
from spmd_tx.coordinator.scheduler.generation import GenerationEnd
from spmd_tx.coordinator.training import line
from spmd_tx.coordinator.wire.sampling import ModelInput, ModelInputChunk, SampleRequest
from spmd_tx.errors import DamagedBody, ServerFault
from spmd_tx.protocol.commands import Decode, ForwardBackward, OptimStep
from tests.coordinator.scheduler.fake_sampling import sample, slots
from tests.coordinator.training.bench import HALF, SHORT_ROWS, running

A, B = "alice:train:0", "bob:train:0"


# --- order ------------------------------------------------------------------------------------------


async def test_chunks_that_arrive_last_first_run_in_order(bench):
    bench.create(A)
    for seq_id in (4, 3, 2):
        bench.train(A, seq_id, 10, token=seq_id)
    await bench.result(bench.create(B))
    assert bench.workers.sent(ForwardBackward) == []
    bench.train(A, 1, 10, token=1)
    await bench.result(bench.step(A, 5))
    assert [command.rows.tokens.max() for command in bench.workers.sent(ForwardBackward)] == [1, 2, 3, 4]
    assert isinstance(bench.workers.commands[-1], OptimStep)


async def test_an_optimizer_step_is_sent_before_the_gradients_are_answered(bench):
    bench.create(A)
    await bench.settled()
    bench.workers.is_holding = True
    trained, stepped = bench.train(A, 1, 10), bench.step(A, 2)
    await bench.until(lambda: len(bench.workers.held) == 2)
    assert [type(command) for command in bench.workers.commands[-2:]] == [ForwardBackward, OptimStep]
    assert trained not in bench.log.outcomes
    bench.let_go()
    await bench.result(stepped)


async def test_only_a_few_commands_are_in_flight(bench):
    bench.create(A)
    seq_id = await bench.hold(A, 1)
    for number in range(8):
        bench.train(A, seq_id + number, 10)
    await bench.prepared(A, 4)
    assert len(bench.workers.held) == 3
    bench.workers.answer()
    await bench.until(lambda: bench.workers.sent(ForwardBackward))
    assert len(bench.workers.held) == 3
    bench.let_go()
    await bench.result(bench.step(A, seq_id + 8))


async def test_a_sample_that_arrives_waits_for_two_micro_batches_at_most(bench, sampling):
    bench.create(A)
    seq_id = await bench.hold(A, 1)
    for number in range(8):
        bench.train(A, seq_id + number, *[250] * 8)
    await bench.prepared(A, 4)
    bench.workers.answer(3)
    await bench.until(lambda: len(bench.workers.sent(ForwardBackward)) == 2)
    sampled = await sample(bench)
    await bench.until(lambda: len(bench.workers.held) == 3)
    kinds = [type(command) for command in bench.workers.commands]
    assert kinds[kinds.index(ForwardBackward) :] == [ForwardBackward, ForwardBackward, Decode]
    bench.let_go()
    await bench.outcome(sampled)


async def test_models_share_a_micro_batch_but_requests_of_one_model_never_do(tmp_path):
    async with running(tmp_path, shapes=SHORT_ROWS) as bench:
        bench.create(A)
        bench.create(B)
        seq_id = await bench.hold(A, 1)
        results = [bench.train(A, seq_id, *HALF), bench.train(A, seq_id + 1, *HALF)]
        results.append(bench.train(B, 1, *HALF))
        await bench.prepared(A, 2)
        await bench.prepared(B)
        bench.let_go()
        for request_id in results:
            await bench.result(request_id)
        assert [slots(command) for command in bench.workers.sent(ForwardBackward)] == [{0, 1}, {0}]


async def test_metrics_tell_how_full_micro_batches_are(tmp_path):
    kinds = [
        ("micro_batches", {"shared": "yes"}),
        ("micro_batches", {"shared": "no"}),
        *((f"training_{unit}", {"kind": "used"}) for unit in ("rows", "tokens")),
        ("training_rows", {"kind": "free"}),
        ("training_tokens", {"kind": "padding"}),
    ]

    def counts():
        return [
            REGISTRY.get_sample_value(f"spmd_tx_{name}_total", labels | {"group": "main"}) or 0
            for name, labels in kinds
        ]

    async with running(tmp_path, shapes=SHORT_ROWS) as bench:
        bench.create(A)
        bench.create(B)
        seq_id, before = await bench.hold(A, 1), counts()
        results = [bench.train(A, seq_id, *HALF), bench.train(B, 1, *HALF), bench.train(B, 2, 60)]
        await bench.prepared(A)
        await bench.prepared(B, 2)
        bench.let_go()
        for request_id in results:
            await bench.result(request_id)
    counted = [after - earlier for after, earlier in zip(counts(), before, strict=True)]
    rows, free = 5, 3  # in two blocks of four
    assert counted == [1, 1, rows, 60 * rows, free, 4 * rows + 64 * free]


async def test_a_barrier_of_one_model_holds_no_other_up(bench):
    bench.create(A)
    bench.create(B)
    await bench.settled()
    bench.workers.is_holding = True
    saving, after = bench.save(A, 1, "x"), bench.train(A, 2, 10)
    await bench.until(lambda: bench.workers.sent("save_state"))
    other = bench.train(B, 1, 10)
    await bench.until(lambda: bench.workers.sent(ForwardBackward))
    assert [slots(command) for command in bench.workers.sent(ForwardBackward)] == [{1}]
    bench.let_go()
    for request_id in (saving, after, other):
        await bench.result(request_id)


# --- gaps -------------------------------------------------------------------------------------------


async def test_a_refused_number_holds_nothing_up(bench):
    bench.create(A)
    later = bench.step(A, 2)
    await bench.result(bench.create(B))
    assert later not in bench.log.outcomes
    bench.scheduler.consume(A, 1)
    await bench.result(later)


async def test_a_gap_closes_by_itself_and_who_comes_too_late_is_told(bench, monkeypatch):
    monkeypatch.setattr(line, "LATER_CALL_SECONDS", 0.01)
    bench.create(A)
    await bench.result(bench.step(A, 3))
    message = await bench.failure(bench.train(A, 2, 10))
    assert f"request 2 of {A} came after the service had given up waiting for it" in message
    await bench.result(bench.train(A, 4, 10))


async def test_chunks_without_their_first_are_run_after_a_silence(bench, monkeypatch):
    monkeypatch.setattr(line, "SILENCE_SECONDS", 0.01)
    bench.create(A)
    await bench.result(bench.train(A, 3, 10))


async def test_a_model_that_is_not_there_fails_at_once(bench):
    message = await bench.failure(bench.train(A, 1, 10))
    assert f"{A} is no longer on this server" in message


# --- samples ----------------------------------------------------------------------------------------


async def test_a_sample_joins_the_batch_with_the_version_of_its_sampler(bench, sampling):
    base = await sample(bench)
    await bench.outcome(base)
    bench.create(A)
    await bench.result(bench.save_for_sampler(A, 1, sampling_session_seq_id=1))
    tuned = bench.submit(
        "sample", "alice:sample:1", 0, SampleRequest(ModelInput([ModelInputChunk(tokens=[1])]))
    )
    await bench.outcome(tuned)
    assert sampling.admitted == {base: BASE_MODEL, tuned: "alice:sample:1"}


async def test_a_sample_of_weights_that_are_not_saved_yet_is_refused(bench):
    bench.create(A)
    seq_id = await bench.hold(A, 1)
    bench.save_for_sampler(A, seq_id, sampling_session_seq_id=0)
    await bench.prepared(A)
    early = bench.submit(
        "sample", "alice:sample:0", 0, SampleRequest(ModelInput([ModelInputChunk(tokens=[1])]))
    )
    assert "the weights of sampler alice:sample:0 are not there" in await bench.failure(early)


async def test_an_unknown_sampler_fails_the_sample(bench):
    body = SampleRequest(ModelInput([ModelInputChunk(tokens=[1])]))
    assert "sampler 'x:sample:0' does not exist" in await bench.failure(
        bench.submit("sample", "x:sample:0", 0, body)
    )


async def test_a_cancelled_sample_leaves_the_batch(bench, sampling):
    sampling.decodes = 10**9
    endless = await sample(bench)
    while endless not in sampling.admitted:
        await asyncio.sleep(0)
    bench.scheduler.cancel(endless)
    assert "cancelled" in await bench.failure(endless)
    assert not sampling.waiting()
    bench.scheduler.cancel(endless)  # nothing happens
    bench.scheduler.cancel("unknown")


async def test_only_samples_can_be_cancelled(bench):
    bench.create(A)
    trained = bench.train(A, 1, 10)
    bench.scheduler.cancel(trained)
    await bench.result(trained)


# --- ends -------------------------------------------------------------------------------------------


async def test_a_mistake_in_the_service_outside_of_any_request_ends_the_generation(bench, monkeypatch):
    def mistaken(*_):
        raise ZeroDivisionError

    await bench.result(bench.create(A))
    monkeypatch.setattr(bench.scheduler._execution, "_release", mistaken)
    bench.train(A, 1, 10)
    with pytest.raises(ServerFault, match="internal error") as end:
        await bench.run
    assert not end.value.has_suspects


@pytest.mark.parametrize(
    "error", [OSError(5, "Input/output error"), DamagedBody("the server has lost the body of this request")]
)
async def test_storage_that_cannot_be_read_fails_one_request(bench, error):
    bench.create(A)
    unreadable = bench.train(A, 1, 10)
    bench.log.payloads[unreadable] = error
    assert str(error) in await bench.failure(unreadable, category="server")
    await bench.result(bench.train(A, 2, 10))


async def test_a_session_that_ends_leaves_no_version_behind(bench, sampling):
    bench.create(A)
    for seq_id in range(1, 9):  # more than the bank holds
        await bench.result(bench.save_for_sampler(A, seq_id, sampling_session_seq_id=seq_id))
    paged = [command.target.name for command in bench.workers.sent("page_out")]
    assert paged
    for seq_id in range(1, 9):
        folder = bench.directory / "versions" / folder_name(f"alice:sample:{seq_id}")
        folder.mkdir()
        bench.bank.note_folder(f"alice:sample:{seq_id}", folder)
    sampling.decodes = 3
    late = bench.submit(
        "sample", "alice:sample:2", 0, SampleRequest(ModelInput([ModelInputChunk(tokens=[1])]))
    )
    bench.scheduler.session_ended("alice")
    await bench.outcome(late)
    assert isinstance(bench.log.outcomes[late], Finished)  # nothing in flight is failed
    await bench.until(lambda: not list((bench.directory / "versions").iterdir()))
    assert not any(bench.bank.knows(f"alice:sample:{seq_id}") for seq_id in range(1, 9))
    (dropped,) = bench.bank.take_dropped()
    assert {place.name for place in dropped.places} == set(paged)


async def test_work_that_came_before_the_workers_were_ready_is_done(tmp_path, sampling):
    async with running(tmp_path, sampling=sampling) as bench:
        bench.run.cancel()
        await asyncio.wait([bench.run])
        bench.create(A)
        await bench.start()
        await bench.result(bench.train(A, 1, 10))


async def test_a_loss_is_counted_once_though_the_database_is_away_when_it_is_judged(bench, monkeypatch):
    monkeypatch.setattr("spmd_tx.coordinator.storage.outages.RETRY_SECONDS", 0.0)
    outages, count_losses = [ConnectionError("the database does not answer")] * 2, bench.log.count_losses

    async def interrupted(in_flight, blamed):
        if outages:
            raise outages.pop()
        return await count_losses(in_flight, blamed)

    monkeypatch.setattr(bench.log, "count_losses", interrupted)
    bench.scheduler._remains = GenerationEnd({"request"}, {"request"})
    await asyncio.gather(bench.scheduler.judge(), bench.scheduler.judge())
    assert (outages, bench.log.losses) == ([], {"request": 1})
