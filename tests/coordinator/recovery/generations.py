"""Generations of fake workers, one after the other."""

import asyncio

import pytest

from spmd_tx.coordinator.wire.sampling import ModelInput, ModelInputChunk, SampleRequest
from spmd_tx.errors import WorkerLost
from tests.coordinator.training.fake_trainer import FakeTrainer


async def next_generation(bench, by_command=False, holds=(), refused=()):
    """Lose the workers, with all that they know, and start others."""
    held, bench.workers.held = bench.workers.held, []
    for answer, _ in held:
        answer.set_exception(WorkerLost("worker 1 was killed by signal 9", by_command))
    if held:
        with pytest.raises(WorkerLost):
            await bench.run
    else:
        bench.run.cancel()
        await asyncio.wait([bench.run])
    bench.workers = FakeTrainer()
    bench.workers.holds, bench.workers.refused = holds, refused
    await bench.start()


async def train_for_a_while(bench, model, first=1):
    """Three steps, of three requests each."""
    for seq_id in range(first, first + 9, 3):
        bench.train(model, seq_id, 10, 20, token=seq_id)
        bench.train(model, seq_id + 1, 30, token=seq_id)
        await bench.result(bench.step(model, seq_id + 2, learning_rate=0.1 * seq_id))


def prompt():
    return SampleRequest(ModelInput([ModelInputChunk(tokens=[1])]))
