from itertools import pairwise

from spmd_tx.coordinator.tenancy.callers import Caller
from spmd_tx.coordinator.wire.sessions import CreateSessionRequest
from spmd_tx.protocol.commands import Decode, ForwardBackward
from tests.coordinator.scheduler.fake_sampling import sample, slots
from tests.support.moves import page_out

A, B = "alice:train:0", "bob:train:0"


async def test_a_small_tenant_does_not_wait_for_a_large_one_to_finish(bench):
    bench.create(A)
    bench.create(B)
    seq_id = await bench.hold(A, 1)
    flood = [bench.train(A, seq_id + number, *[250] * 8) for number in range(20)]
    await bench.prepared(A, 4)
    small = bench.train(B, 1, 10)
    await bench.prepared(B)
    bench.let_go()
    await bench.result(small)
    for request_id in flood:
        await bench.result(request_id)
    batches = [slots(command) for command in bench.workers.sent(ForwardBackward)]
    assert {1} in batches[:2]


async def test_models_are_charged_to_the_owners_of_their_sessions(bench):
    session = await bench.catalog.create_session(CreateSessionRequest(), Caller("bob", "user"))
    bobs = f"{session.id}:train:0"
    await bench.result(bench.create(bobs))
    assert bench.scheduler._execution.lines[bobs].model.tenant == "bob"


async def test_the_models_of_a_session_take_turns(bench):
    second = "alice:train:1"
    bench.create(A)
    bench.create(second)
    seq_id = await bench.hold(A, 1)
    results = [bench.train(A, seq_id, *[250] * 48), bench.train(second, 1, *[250] * 48)]
    await bench.prepared(A, 3)
    await bench.prepared(second, 3)
    bench.let_go()
    for request_id in results:
        await bench.result(request_id)
    order = [slots(command) for command in bench.workers.sent(ForwardBackward)]
    assert all(before != after for before, after in pairwise(order))


async def test_a_short_sample_does_not_wait_for_a_long_queue_of_training(bench, sampling):
    bench.create(A)
    seq_id = await bench.hold(A, 1)
    for number in range(10):
        bench.train(A, seq_id + number, *[250] * 8)
    await sample(bench)
    await bench.prepared(A, 4)
    await bench.until(sampling.waiting)
    bench.let_go()
    await bench.settled()
    kinds = [
        type(command) for command in bench.workers.commands if isinstance(command, Decode | ForwardBackward)
    ]
    assert Decode in kinds[:2]


async def test_what_a_decode_needs_is_sent_right_before_it(bench, sampling):
    bench.create(A)
    seq_id = await bench.hold(A, 1)
    sampling.before = [page_out(bank, f"version {bank}") for bank in (1, 2, 3)]
    trained, sampled = bench.train(A, seq_id, 10), await sample(bench)
    await bench.prepared(A)
    await bench.until(sampling.waiting)
    bench.let_go()
    await bench.result(trained)
    await bench.outcome(sampled)
    kinds = [command.name for command in bench.workers.commands]
    first = kinds.index("page_out")
    assert kinds[first : first + 4] == ["page_out", "page_out", "page_out", "decode"]
