"""Workers refuse a folder of another base model: one request fails, and nothing else is disturbed."""

from tests.coordinator.recovery.generations import next_generation

A, B = "alice:train:0", "bob:train:0"


async def refused_load(bench, model, seq_id):
    """Have a model load a checkpoint of another one, which the workers refuse."""
    path = (await bench.result(bench.save(B, 1, "x")))["path"]
    bench.workers.refused = {str(bench.snapshots.place(model, seq_id))}
    return await bench.failure(bench.load(model, seq_id, path))


async def test_only_the_load_fails_and_the_model_goes_on_from_where_it_was(bench):
    await bench.result(bench.create(A, seed=3, rank=2))
    await bench.result(bench.create(B, seed=4))
    assert "not loaded" in await refused_load(bench, A, 1)
    bench.train(A, 2, 10)
    await bench.result(bench.step(A, 3, learning_rate=0.5))
    await bench.result(bench.step(B, 2))
    assert bench.scheduler._execution.lines[A].model.adapter.rank == 2
    assert bench.workers.weights == {0: 3.0 - 0.5 * 11.25, 1: 4.0}


async def test_a_model_that_was_to_begin_with_it_says_why_there_is_none(bench):
    await bench.result(bench.create(B))
    assert "another base model" in await refused_load(bench, A, 0)
    assert f"{A} was not created" in await bench.failure(bench.step(A, 1))
    await bench.result(bench.step(B, 2))


async def test_a_model_whose_snapshot_is_refused_is_refused_and_others_go_on(bench):
    await bench.result(bench.create(A))
    await bench.result(bench.create(B, seed=4))
    path = (await bench.result(bench.save(B, 1, "x")))["path"]
    await bench.result(bench.load(A, 1, path))
    refused = {str(bench.snapshots.place(A, 1))}
    await next_generation(bench, refused=refused)
    assert "cannot be restored: the weights were not loaded" in await bench.failure(bench.step(A, 2))
    await bench.result(bench.train(B, 2, 5))
    assert 4.0 in bench.workers.weights.values()
