"""The scheduler with the real sample batch: several clients train, save and sample at once."""

import asyncio

import numpy as np
import pytest

from spmd_tx.coordinator.sampling.batch import SampleBatch
from spmd_tx.coordinator.sampling.new_job import SamplingModel, draw_seeds
from spmd_tx.coordinator.sampling.shapes import SamplingLimits, SamplingShapes
from spmd_tx.coordinator.wire import tinker_pb2
from spmd_tx.coordinator.wire.sampling import ModelInput, ModelInputChunk, SampleRequest, SamplingParams
from spmd_tx.protocol.commands import Drop
from tests.coordinator.sampling.bench import MAX_CONTEXT, MODEL, PAGE_SIZE, Words, prompt_of
from tests.coordinator.sampling.fake_device import FakeDevice, FakeWorkers, continuation
from tests.coordinator.training.bench import running
from tests.support.ready_programs import EverythingReady

PAGES = 40
ROUNDS = 5
CLIENTS = ("alice", "bob")


def sample_batch(bank):
    limits = SamplingLimits(
        shapes=SamplingShapes(2, MAX_CONTEXT, PAGE_SIZE, decode_rows=4), pages_per_shard=PAGES, decode_steps=4
    )
    return SampleBatch(SamplingModel(MODEL, MAX_CONTEXT, Words()), bank, limits, EverythingReady())


@pytest.fixture
async def bench(tmp_path):
    workers = FakeWorkers(FakeDevice(shards=2, pages=PAGES, page_size=PAGE_SIZE))
    async with running(tmp_path, sampling=sample_batch, workers=workers) as bench:
        yield bench


async def train_and_sample(bench, session):
    """Train, save, and sample all versions so far, round after round; tokens by (round, version)."""
    model, seq_id, drawn = f"{session}:train:0", 1, {}
    await bench.result(bench.create(model))
    for number in range(ROUNDS):
        trained = bench.train(model, seq_id, 40, 60)
        stepped = bench.step(model, seq_id + 1)
        saved = bench.save_for_sampler(model, seq_id + 2, sampling_session_seq_id=number)
        seq_id += 3
        await bench.result(saved)
        asked = {version: draw(bench, session, number, version) for version in range(number + 1)}
        for version, request_id in asked.items():
            response = tinker_pb2.SampleResponse.FromString((await bench.outcome(request_id)).body)
            drawn[number, version] = [
                np.frombuffer(each.tokens, np.int32).tolist() for each in response.sequences
            ]
        assert {trained, stepped} <= set(bench.log.outcomes)
    return drawn


def draw(bench, session, number, version):
    body = SampleRequest(
        ModelInput([ModelInputChunk(tokens=prompt_of(5 + number))]),
        SamplingParams(max_tokens=6, seed=number),
        num_samples=3,
        sampling_session_id=f"{session}:sample:{version}",
    )
    return bench.submit("sample", f"{session}:sample:{version}", number, body)


async def test_every_version_draws_its_own_tokens_while_others_train_and_sample(bench):
    drawn = dict(
        zip(CLIENTS, await asyncio.gather(*(train_and_sample(bench, each) for each in CLIENTS)), strict=True)
    )
    saves = [command for command in bench.workers.commands if command.name == "save_sampler"]
    names = [f"slot {command.source.slot} at {number}" for number, command in enumerate(saves, start=1)]
    for slot, session in enumerate(CLIENTS):
        versions = [name for name in names if name.startswith(f"slot {slot} ")]
        for (number, version), samples in drawn[session].items():
            expected = [
                continuation(versions[version], prompt_of(5 + number), draw_seeds(number, "", index), 6)[0]
                for index in range(3)
            ]
            assert samples == expected
    assert len(saves) == ROUNDS * len(CLIENTS)
    assert any(command.name == "page_out" for command in bench.workers.commands)  # more than the bank holds
    bench.scheduler.session_ended(CLIENTS[0])
    await bench.until(lambda: isinstance(bench.workers.commands[-1], Drop))
    assert any(command.name == "page_in" for command in bench.workers.commands)
    assert not any(command.name == "load_sampler" for command in bench.workers.commands)  # reads files
