import pytest

from spmd_tx.coordinator.scheduler.command_seconds import work_of_chunk
from spmd_tx.coordinator.scheduler.queue_status import in_words
from tests.coordinator.scheduler.fake_sampling import sample

A, B = "alice:train:0", "bob:train:0"


async def test_the_status_of_a_training_request_names_what_it_waits_for(bench):
    bench.create(A)
    seq_id = await bench.hold(A, 1)
    waiting, gapped = bench.train(A, seq_id, 10), bench.train(A, seq_id + 2, 10)
    await bench.prepared(A)
    status = bench.scheduler.status(waiting)
    assert (status.queue_state, status.reason) == ("active", "behind 3 earlier requests of this model")
    expected = f"waiting for request {seq_id + 1} of this model, which has not arrived"
    assert bench.scheduler.status(gapped).reason == expected
    bench.workers.busy = "compiling forward_backward 8x256"
    assert bench.scheduler.status(gapped).reason == f"compiling a training step of 8 x 256 tokens; {expected}"


async def test_the_status_of_a_training_request_tells_how_much_others_have_ready(bench):
    bench.create(A)
    bench.create(B)
    seq_id = await bench.hold(A, 1)
    mine = bench.train(A, seq_id, 10)
    for other in (1, 2):
        bench.train(B, other, 10)
    await bench.prepared(B, 2)
    others = "taking turns with 1 other model, which has 2 micro-batches ready"
    expected = f"behind 3 earlier requests of this model; {others}"
    assert bench.scheduler.status(mine).reason == expected


async def test_the_status_tells_how_long_the_work_before_a_request_takes(bench, sampling):
    bench.create(A)
    bench.create(B)
    seq_id = await bench.hold(A, 1)
    for other in (1, 2):
        bench.train(B, other, 10)
    first, mine = bench.train(A, seq_id, 10), bench.train(A, seq_id + 1, 10)
    await bench.prepared(A, 2)
    await bench.prepared(B, 2)
    of_others = [step.chunk for step in bench.scheduler._execution.lines[B].model.unsent]
    bench.scheduler._execution._dispatcher.seconds.learn(work_of_chunk(of_others[0]), 4.0)
    assert bench.scheduler.status(first).reason.endswith("; about 8 seconds of work before it")
    assert bench.scheduler.status(mine).reason.endswith("; about 12 seconds of work before it")
    await sample(bench)
    await bench.until(sampling.waiting)
    assert bench.scheduler.status(first).reason.endswith("; about 16 seconds of work before it")


@pytest.mark.parametrize(
    "busy, words",
    [
        ("compiling prefill 1x4096", "compiling a 4096-token prefill"),
        ("compiling prefill with logprobs 2x256", "compiling a prefill of 2 x 256 tokens"),
        ("was lost; compiling decode 4x16x64", "was lost; compiling a decode step"),
        ("compiling forward 1x64", "compiling a 64-token forward step"),
        (
            "compiling forward_backward 4x256, 3 of 40 programs are ready",
            "compiling a training step of 4 x 256 tokens, 3 of 40 programs are ready",
        ),
        ("loading weights 45 %", "loading weights 45 %"),
    ],
)
def test_what_is_compiled_is_told_in_words(busy, words):
    assert in_words(busy) == words


async def test_a_sample_that_finds_no_room_is_paused(bench, sampling):
    sampling.decodes = 10**9
    sampled = await sample(bench)
    assert bench.scheduler.status(sampled).queue_state == "active"
    sampling.obstacles[sampled] = "12 samples ahead"
    status = bench.scheduler.status(sampled)
    assert (status.queue_state, status.reason) == ("paused_capacity", "12 samples ahead")
    assert bench.scheduler.status("finished long ago").queue_state == "active"
