"""Saves of kind inflight: each one publishes its model's newest version."""

from types import SimpleNamespace

import pytest

from spmd_tx.coordinator.catalog.catalog import SamplerWeights
from spmd_tx.coordinator.runtime.folder_names import folder_name
from spmd_tx.coordinator.sampling.bank import VersionBank
from spmd_tx.coordinator.sampling.inflight_versions import InflightVersions
from spmd_tx.coordinator.sampling.version_store import FROM_DISK
from spmd_tx.coordinator.wire.sampling import ModelInput, ModelInputChunk, SampleRequest
from spmd_tx.errors import InvalidRequest, WorkerLost
from spmd_tx.protocol.commands import AdapterSpec
from tests.coordinator.sampling.bench import Bench, expected, prompt_of
from tests.coordinator.training.bench import NoSampling, running
from tests.coordinator.training.fake_trainer import FakeTrainer

A, B = "alice:train:0", "bob:train:0"


@pytest.fixture
def given_up():
    return []


@pytest.fixture
def versions(given_up):
    return InflightVersions(given_up.append)


def test_the_newest_of_each_model_counts(versions):
    assert versions.newest(A) is None
    versions.publish(A, 3, "a3")
    versions.publish(B, 9, "b9")
    versions.publish(A, 5, "a5")
    assert (versions.newest(A), versions.newest(B)) == ("a5", "b9")
    versions.forget({"b9"})
    assert (versions.newest(A), versions.newest(B)) == ("a5", None)


def test_an_older_one_stays_until_the_newer_ones_save_is_answered(versions, given_up):
    versions.publish(A, 3, "a3")
    versions.answered(A, 3)
    versions.publish(A, 5, "a5")
    assert given_up == []  # after a crash now, the model may be restored to what lies before request 5
    versions.answered(A, 5)
    assert given_up == ["a3"]


def test_what_is_run_again_was_answered_before(versions, given_up):
    versions.publish(A, FROM_DISK, "old")
    for seq_id in (3, 5):
        versions.answered(A, seq_id)
        versions.publish(A, seq_id, f"a{seq_id}")
    assert given_up == ["old", "a3"]


@pytest.fixture
def bank(tmp_path):
    return VersionBank(4, tmp_path)


def test_a_superseded_version_is_forgotten_when_its_last_request_lets_go(bank):
    bank.reserve("v", AdapterSpec(rank=4))
    bank.hold("v")
    bank.hold("v")
    bank.let_go("v")
    bank.supersede("v")
    assert bank.knows("v")
    bank.let_go("v")
    assert not bank.knows("v")
    bank.let_go("v")  # nothing happens


def test_requests_are_sampled_from_one_version_to_their_end():
    bench = Bench(rows=2)
    bench.register("v1")
    for name in ("runs", "waits", "is cancelled"):
        bench.admit(name, prompt_of(5), "v1", num_samples=2, max_tokens=20, seed=1)
    bench.send()
    bench.bank.supersede("v1")
    bench.batch.cancel("is cancelled")
    bench.run()
    tokens = [expected("", prompt_of(5), 20, seed=1, index=index, version="v1")[0] for index in range(2)]
    assert bench.tokens("runs") == bench.tokens("waits") == tokens
    assert not bench.bank.knows("v1")


@pytest.fixture
async def bench(tmp_path):
    async with running(tmp_path) as bench:
        bench.create(A, seed=7)
        yield bench


async def publish(bench, seq_id, number):
    """Train a step, then save; return the sampler's id."""
    bench.train(A, seq_id, 4)
    bench.step(A, seq_id + 1, learning_rate=1.0)
    save = bench.save_for_sampler(A, seq_id + 2, sampling_session_seq_id=number, kind="inflight")
    return (await bench.result(save))["sampling_session_id"]


async def test_all_samplers_of_a_model_draw_from_what_was_published_last(bench):
    first = await publish(bench, 1, 0)
    assert await bench.version_of(first) == first
    second = await publish(bench, 4, 1)
    assert await bench.version_of(first) == await bench.version_of(second) == second
    snapshot = await bench.result(bench.save_for_sampler(A, 7, sampling_session_seq_id=2))
    assert await bench.version_of(first) == second
    assert await bench.version_of(snapshot["sampling_session_id"]) == snapshot["sampling_session_id"]


async def test_many_saves_fit_where_a_few_versions_do(bench):
    samplers = [await publish(bench, 1 + 3 * number, number) for number in range(12)]
    await bench.until(lambda: [name for name in samplers if bench.bank.knows(name)] == samplers[-1:])
    assert bench.workers.sent("page_out") == []


async def test_a_superseded_version_on_disk_is_deleted(bench):
    first = await publish(bench, 1, 0)
    folder = bench.directory / "versions" / folder_name(first)
    bench.bank.note_folder(first, folder)
    folder.mkdir()
    await publish(bench, 4, 1)
    await bench.until(lambda: not folder.exists())


async def test_after_a_loss_samplers_draw_from_what_was_published_last(bench):
    first = await publish(bench, 1, 0)
    second = await publish(bench, 4, 1)
    bench.workers.is_holding = True
    bench.train(A, 7, 4)
    await bench.until(lambda: bench.workers.held)
    bench.workers.die(WorkerLost("gone"))
    with pytest.raises(WorkerLost):
        await bench.run
    bench.workers = FakeTrainer()
    await bench.start()
    assert await bench.version_of(first) == second
    await bench.settled()
    saves = bench.workers.sent("save_sampler")
    assert len(saves) == 2
    assert not bench.bank.knows(first)


class Samples(NoSampling):
    """A batch whose samples never end."""

    def __init__(self):
        self.versions = {}  # by request

    def admit(self, request_id, body, version, grammar=None, images=None):
        self.versions[request_id] = version

    def resume(self, job):
        self.versions[job.request_id] = job.version

    def unanswered(self):
        return {id: SimpleNamespace(request_id=id, version=version) for id, version in self.versions.items()}


async def test_after_a_loss_a_request_goes_on_with_what_was_published_last(tmp_path):
    batches = []

    def new_batch(_):
        batches.append(Samples())
        return batches[-1]

    async with running(tmp_path, sampling=new_batch) as bench:
        bench.create(A, seed=7)
        first = await publish(bench, 1, 0)
        body = SampleRequest(ModelInput([ModelInputChunk(tokens=[1])]))
        request_id = bench.submit("sample", first, 0, body)
        await bench.until(lambda: batches[0].versions == {request_id: first})
        second = await publish(bench, 4, 1)
        assert batches[0].versions == {request_id: first}
        bench.workers.is_holding = True
        bench.train(A, 7, 4)
        await bench.until(lambda: bench.workers.held)
        bench.workers.die(WorkerLost("gone"))
        with pytest.raises(WorkerLost):
            await bench.run
        bench.workers = FakeTrainer()
        await bench.start()
        await bench.until(lambda: batches[-1].versions)
        assert batches[-1].versions == {request_id: second}


async def test_what_was_published_before_the_snapshot_is_found_on_disk(bench):
    first = await publish(bench, 1, 0)
    second = await publish(bench, 4, 1)
    for name in (first, second):  # the older one is left over from an earlier crash
        folder = bench.directory / "versions" / folder_name(name)
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text(
            '{"r": 4, "lora_alpha": 32, "target_modules": ["q_proj"]}'
        )
    bench.versions.inflight.forget({second})  # as after a restart
    bench.bank.forget(second)
    assert await bench.version_of(first) == second


async def test_without_anything_published_there_is_nothing_to_sample(bench):
    sampler = await bench.catalog.add_sampler("alice", 0, "tiny", SamplerWeights(model_id=A, inflight=True))
    with pytest.raises(InvalidRequest, match="are not there"):
        await bench.version_of(sampler.id)
