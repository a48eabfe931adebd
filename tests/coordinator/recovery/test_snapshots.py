import asyncio
from pathlib import Path

from spmd_tx.coordinator.storage.folders import MANIFEST, is_intact
from spmd_tx.errors import MeshError
from spmd_tx.protocol.commands import AdapterSpec, OptimStep
from spmd_tx.protocol.reports import Written
from tests.coordinator.recovery.generations import next_generation, prompt, train_for_a_while
from tests.coordinator.scheduler.fake_sampling import FakeSampling
from tests.coordinator.training.bench import running

A, B = "alice:train:0", "bob:train:0"


async def test_only_what_is_behind_the_snapshot_is_run_again(bench):
    bench.snapshots.seconds_between = 0.0
    await bench.result(bench.create(A, seed=5))
    await train_for_a_while(bench, A)
    await bench.until(lambda: bench.snapshots.is_behind(A, 9))
    bench.snapshots.seconds_between = 3600.0
    await train_for_a_while(bench, A, first=10)
    expected = bench.workers.weights[0]
    await next_generation(bench)
    await bench.result(bench.train(A, 19, 5))
    assert bench.workers.weights == {0: expected}
    assert bench.workers.sent("create_adapter") == []
    assert (len(bench.workers.sent("load_state")), len(bench.workers.sent(OptimStep))) == (1, 3)


async def test_steps_behind_the_snapshots_are_counted_before_workers_are_there(bench):
    assert await bench.scheduler.steps_to_run_again() == 0
    await bench.result(bench.create(A, seed=5))
    await train_for_a_while(bench, A)  # three steps, with two gradients each
    assert await bench.scheduler.steps_to_run_again() == 9
    await bench.scheduler.drain()
    assert await bench.scheduler.steps_to_run_again() == 0
    await bench.result(bench.train(A, 10, 5))
    await bench.scheduler.drain()  # a gradient is in no snapshot
    assert await bench.scheduler.steps_to_run_again() == 1


async def test_a_damaged_snapshot_gives_way_to_the_one_before(bench, caplog):
    bench.snapshots.seconds_between = 0.0
    await bench.result(bench.create(A))
    for seq_id in (1, 2):
        await bench.result(bench.step(A, seq_id))
        await bench.until(lambda seq_id=seq_id: bench.snapshots.is_behind(A, seq_id))
    expected = bench.workers.weights[0]
    (bench.snapshots.place(A, 2) / "state").write_text("")
    await next_generation(bench)
    await bench.result(bench.train(A, 3, 5))
    assert bench.workers.weights == {0: expected}
    assert bench.workers.sent("load_state")[0].source.path == str(bench.snapshots.place(A, 1))
    assert "cannot be used" in caplog.text


async def test_two_snapshots_are_kept(bench):
    bench.snapshots.seconds_between = 0.0
    await bench.result(bench.create(A))
    for seq_id in range(1, 5):
        await bench.result(bench.step(A, seq_id))
        await bench.until(lambda seq_id=seq_id: bench.snapshots.is_behind(A, seq_id))
    await bench.until(
        lambda: sorted(path.name for path in bench.snapshots.place(A, 1).parent.iterdir()) == ["3", "4"]
    )


async def test_draining_takes_a_snapshot_of_what_has_moved_on(bench):
    await bench.result(bench.create(A))
    await bench.result(bench.create(B))
    await bench.result(bench.step(A, 1))
    bench.train(B, 1, 10)
    await bench.settled()
    await bench.scheduler.drain()
    (snapshot,) = bench.workers.sent("snapshot")
    assert Path(snapshot.target.path).parent == bench.snapshots.place(A, 1).parent
    assert (bench.snapshots.place(A, 1) / MANIFEST).exists()


async def test_workers_of_an_earlier_generation_cannot_touch_what_later_ones_write(bench):
    """They may still live when they cannot be reached: every attempt has a place of its own."""
    bench.snapshots.begin(A, 1)
    of_the_earlier = bench.snapshots.staged(A, 1)
    bench.snapshots.abandon(MeshError("lost"))
    written = bench.snapshots.begin(A, 1)
    of_the_later = bench.snapshots.staged(A, 1)
    assert of_the_earlier != of_the_later
    for path in (of_the_earlier, of_the_later):
        path.mkdir(parents=True)
        (path / "state").write_text(path.name)
    bench.snapshots.writes.take(Written(generation=1, process=0, path=str(of_the_earlier)))
    assert not written.done()
    bench.snapshots.writes.take(Written(generation=2, process=0, path=str(of_the_later)))
    assert await written is None
    await bench.snapshots.record(A, 1, of_the_later, AdapterSpec(rank=4))
    (of_the_earlier / "state").write_text("half")
    assert is_intact(bench.snapshots.place(A, 1)) is None
    assert (bench.snapshots.place(A, 1) / "state").read_text() == of_the_later.name


async def test_draining_waits_for_a_snapshot_that_is_being_taken(bench):
    bench.snapshots.seconds_between = 0.0
    await bench.result(bench.create(A))
    bench.workers.holds = "snapshot"
    bench.step(A, 1)
    await bench.until(lambda: bench.workers.held)
    draining = asyncio.create_task(bench.scheduler.drain())
    await bench.settled()
    bench.workers.answer()
    await draining
    assert len(bench.workers.sent("snapshot")) == 1
    assert bench.snapshots.is_behind(A, 1)


async def test_loaded_weights_do_not_depend_on_the_checkpoint_any_more(bench):
    await bench.result(bench.create(A, seed=3))
    path = (await bench.result(bench.save(A, 1, "x")))["path"]
    await bench.result(bench.create(B, seed=4))
    await bench.result(bench.load(B, 1, path))
    bench.train(B, 2, 10)
    await bench.result(bench.step(B, 3, learning_rate=0.5))
    await bench.result(bench.save(A, 2, "x", overwrite=True))
    expected = dict(bench.workers.weights)
    await next_generation(bench)
    await bench.result(bench.train(B, 4, 10))
    assert bench.workers.weights == expected


# --- versions -----------------------------------------------------------------------------------------


async def test_the_versions_saved_before_a_snapshot_are_written_out_with_it(bench):
    bench.snapshots.seconds_between = 0.0
    await bench.result(bench.create(A))
    await bench.result(bench.save_for_sampler(A, 1, sampling_session_seq_id=1))
    await bench.result(bench.step(A, 2))
    await bench.until(lambda: bench.snapshots.is_behind(A, 2))
    kinds = [command.name for command in bench.workers.commands]
    assert kinds[-2:] == ["write_sampler", "snapshot"]


async def test_the_versions_saved_before_a_load_are_written_out_with_it(bench):
    await bench.result(bench.create(A))
    path = (await bench.result(bench.save(A, 1, "x")))["path"]
    await bench.result(bench.save_for_sampler(A, 2, sampling_session_seq_id=1))
    await bench.result(bench.load(A, 3, path))
    kinds = [command.name for command in bench.workers.commands]
    assert kinds[-2:] == ["write_sampler", "load_state"]


async def test_a_snapshot_counts_only_once_the_versions_before_it_are_on_disk(bench):
    bench.snapshots.seconds_between = 0.0
    await bench.result(bench.create(A))
    await bench.result(bench.save_for_sampler(A, 1, sampling_session_seq_id=1))
    bench.workers.holds_writes = True
    await bench.result(bench.step(A, 2))
    await bench.until(lambda: len(bench.workers.unwritten) == 2)
    of_version, of_snapshot = bench.workers.unwritten
    bench.snapshots.writes.take(of_snapshot)
    await bench.settled()
    assert not bench.snapshots.is_behind(A, 2)
    bench.snapshots.writes.take(of_version)
    await bench.until(lambda: bench.snapshots.is_behind(A, 2))


async def test_a_load_is_answered_only_once_the_versions_before_it_are_on_disk(bench):
    await bench.result(bench.create(A))
    path = (await bench.result(bench.save(A, 1, "x")))["path"]
    await bench.result(bench.save_for_sampler(A, 2, sampling_session_seq_id=1))
    bench.workers.holds_writes = True
    loading = bench.load(A, 3, path)
    await bench.until(lambda: bench.workers.unwritten and bench.workers.sent("load_state"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert loading not in bench.log.outcomes
    bench.snapshots.writes.take(bench.workers.unwritten.pop())
    await bench.result(loading)


async def test_a_version_is_written_again_if_it_could_not_be_written_before(bench):
    bench.snapshots.seconds_between = 0.0
    await bench.result(bench.create(A))
    await bench.result(bench.save_for_sampler(A, 1, sampling_session_seq_id=1))
    bench.workers.write_error = "OSError: No space left on device"
    await bench.result(bench.step(A, 2))
    await bench.until(lambda: not bench.versions._writing and not bench.snapshots._writing)
    await bench.settled()
    assert not bench.snapshots.is_behind(A, 2)
    bench.workers.write_error = None
    await bench.result(bench.step(A, 3))
    await bench.until(lambda: bench.snapshots.is_behind(A, 3))
    assert len(bench.workers.sent("write_sampler")) == 2


async def test_versions_come_back_with_their_model(bench):
    await bench.result(bench.create(A))
    await bench.result(bench.save_for_sampler(A, 1, sampling_session_seq_id=1))
    await bench.result(bench.step(A, 2))
    await next_generation(bench)
    assert await bench.version_of("alice:sample:1") == "alice:sample:1"
    kinds = [command.name for command in bench.workers.commands]
    assert kinds[:2] == ["create_adapter", "save_sampler"]


async def test_a_sample_whose_model_is_being_restored_waits_through_one_more_loss(tmp_path):
    async with running(tmp_path, slots=3, sampling=FakeSampling()) as bench:
        await bench.result(bench.create(A))
        await bench.result(bench.save_for_sampler(A, 1, sampling_session_seq_id=1))
        await next_generation(bench, holds="create_adapter")
        sampled = bench.submit("sample", "alice:sample:1", 0, prompt())
        await bench.until(lambda: bench.workers.held)
        await next_generation(bench)
        await bench.outcome(sampled)
        assert bench.scheduler._execution.sampling.admitted == {sampled: "alice:sample:1"}


async def test_a_sample_that_its_session_has_left_behind_is_drawn_from_the_same_weights(tmp_path):
    async with running(tmp_path, slots=3, sampling=lambda _: FakeSampling()) as bench:
        await bench.result(bench.create(A))
        await bench.result(bench.create(B))
        await bench.result(bench.save_for_sampler(A, 1, sampling_session_seq_id=1))
        bench.workers.is_holding = True
        sampled = bench.submit("sample", "alice:sample:1", 0, prompt())
        await bench.until(lambda: bench.workers.held)
        bench.models.ended |= {"alice", "bob"}
        await next_generation(bench)
        await bench.outcome(sampled)
        assert bench.scheduler._execution.sampling.admitted == {sampled: "alice:sample:1"}
        assert len(bench.workers.sent("create_adapter")) == 1
