"""Mutants of the planning of samples: one request is poison to them. It fails, and nothing else does."""

import numpy as np
import pytest

from spmd_tx.coordinator.sampling import batch as batch_module
from spmd_tx.coordinator.sampling.admission import Admission
from spmd_tx.coordinator.sampling.batch import SampleBatch
from spmd_tx.coordinator.sampling.new_job import SamplingModel, draw_seeds
from spmd_tx.coordinator.sampling.prefill import PrefillPlan
from spmd_tx.coordinator.sampling.shapes import SamplingLimits, SamplingShapes
from spmd_tx.coordinator.sampling.shard import Shard
from spmd_tx.coordinator.scheduler.request_table import Danger
from spmd_tx.coordinator.wire import tinker_pb2
from spmd_tx.coordinator.wire.sampling import ModelInput, ModelInputChunk, SampleRequest, SamplingParams
from tests.coordinator.mesh.compiling_workers import CompilingWorkers
from tests.coordinator.sampling.bench import MAX_CONTEXT, MODEL, PAGE_SIZE, Words, prompt_of
from tests.coordinator.sampling.fake_device import BASE, FakeDevice, continuation
from tests.coordinator.training.bench import BASE_MODEL, running

PAGES = 60
POISON = 96  # a token that no other prompt has
TOKENS = 10  # of a sample
SHARDS = 2


def has_poison(*jobs):
    return any(POISON in job.prompt for job in jobs)


def of_line(admission):
    return any(
        has_poison(job) for sampler in admission.line.samplers() for job in admission.line.jobs(sampler, 99)
    )


def of_plan(plan, *_):
    return any(POISON in segment.chunk.content for segment in plan._segments)


def of_rows(samples, *_):
    return any(has_poison(sample.job) for shard in samples for sample in shard)


# What is mutated, and when its mutant raises; "late" ones do so once the sample has some tokens.
MUTANTS = {
    "start of a part": (Admission, "_start_part", lambda self, job, *_: has_poison(job)),
    "any admission": (Admission, "admit", of_line),
    "shares": (Admission, "_share", of_line),
    "end of a plan": (PrefillPlan, "command", of_plan),
    "pages": (Shard, "grow", lambda self, samples, steps: any(has_poison(each.job) for each in samples)),
    "candidates": (
        Shard,
        "candidates",
        lambda self, last: has_poison(*(each.job for each in self.residents)),
    ),
    "choice": (batch_module, "choose", of_rows),
    "command": (batch_module, "decode_command", of_rows),
    "late command": (
        batch_module,
        "decode_command",
        lambda samples, *_: any(has_poison(each.job) and each.tokens for shard in samples for each in shard),
    ),
    "leaving": (Shard, "leave", lambda self, sample: has_poison(sample.job)),
    "wishes": (SampleBatch, "program_requests", lambda self: has_poison(*self._jobs.values())),
}


def sample_batch(bank, orders):
    shapes = SamplingShapes(SHARDS, MAX_CONTEXT, PAGE_SIZE, decode_rows=4)
    limits = SamplingLimits(shapes, pages_per_shard=PAGES, decode_steps=4)
    return SampleBatch(SamplingModel(MODEL, MAX_CONTEXT, Words()), bank, limits, programs=orders)


@pytest.fixture
async def bench(tmp_path):
    workers = CompilingWorkers(FakeDevice(shards=SHARDS, pages=PAGES, page_size=PAGE_SIZE))
    async with running(tmp_path, sampling=sample_batch, workers=workers) as bench:
        yield bench


async def sample(bench, session, prompt, count):
    sampler = await bench.catalog.add_sampler(session, 9, BASE_MODEL)
    body = SampleRequest(
        ModelInput([ModelInputChunk(tokens=prompt)]),
        SamplingParams(max_tokens=TOKENS, seed=5),
        num_samples=count,
        sampling_session_id=sampler.id,
    )
    return bench.submit("sample", sampler.id, 0, body)


async def tokens(bench, request_id):
    response = tinker_pb2.SampleResponse.FromString((await bench.outcome(request_id)).body)
    return [np.frombuffer(each.tokens, np.int32).tolist() for each in response.sequences]


def mutate(monkeypatch, owner, name, is_meant):
    original, raised = getattr(owner, name), []

    def mutant(*arguments, **named):
        if is_meant(*arguments):
            raised.append(arguments)
            raise KeyError("by a mistake of the service")
        return original(*arguments, **named)

    monkeypatch.setattr(owner, name, mutant)
    return raised


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("poisoned_first", [True, False])
async def test_a_request_that_planning_fails_for_fails_alone(
    bench, monkeypatch, caplog, mutant, poisoned_first
):
    raised = mutate(monkeypatch, *MUTANTS[mutant])
    prompts = {f"friend{number}": prompt_of(5 + number, number) for number in range(4)}
    poisoned = [5, POISON, 7]
    everybody = {"mallory": poisoned, **prompts} if poisoned_first else {**prompts, "mallory": poisoned}
    requests = {name: await sample(bench, name, prompt, 3) for name, prompt in everybody.items()}
    failed = (await bench.outcome(requests["mallory"])).error
    assert raised
    assert "internal error" in failed
    assert failed.split(": ")[0] in caplog.text
    for name, prompt in prompts.items():
        wanted = [continuation(BASE, prompt, draw_seeds(5, "", n), TOKENS)[0] for n in range(3)]
        assert await tokens(bench, requests[name]) == wanted
    again = await sample(bench, "zoe", prompt_of(9), 2)
    assert len(await tokens(bench, again)) == 2
    assert not bench.run.done(), "the generation goes on"
    batch = bench.scheduler._execution.sampling
    assert [shard.pool.free for shard in batch._shards] == [PAGES - 1] * SHARDS
    assert [len(shard.residents) for shard in batch._shards] == [0] * SHARDS
    assert not bench.scheduler._table.in_danger_of(Danger.PLANNING)


async def test_an_error_that_does_not_come_again_fails_nobody(bench, monkeypatch):
    once = iter([True])
    mutate(monkeypatch, Admission, "_start_part", lambda *_: next(once, False))
    requests = [await sample(bench, f"friend{number}", prompt_of(6, number), 3) for number in range(3)]
    for number, request_id in enumerate(requests):
        wanted = [continuation(BASE, prompt_of(6, number), draw_seeds(5, "", n), TOKENS)[0] for n in range(3)]
        assert await tokens(bench, request_id) == wanted


async def test_programs_that_cannot_be_ordered_cost_those_who_wait_for_them(bench, monkeypatch):
    original = bench.workers.compile

    def compile_but(program, **how):
        if program.step == "prefill" and program.top:
            raise KeyError(program)
        return original(program, **how)

    monkeypatch.setattr(bench.workers, "compile", compile_but)
    sampler = await bench.catalog.add_sampler("mallory", 9, BASE_MODEL)
    body = SampleRequest(
        ModelInput([ModelInputChunk(tokens=[5, 6, 7])]),
        SamplingParams(max_tokens=TOKENS, seed=5),
        sampling_session_id=sampler.id,
        topk_prompt_logprobs=3,
    )
    failed = bench.submit("sample", sampler.id, 0, body)
    friends = [await sample(bench, f"friend{number}", prompt_of(6, number), 3) for number in range(3)]
    for request_id in friends:
        assert len(await tokens(bench, request_id)) == 3
    assert "internal error" in (await bench.outcome(failed)).error
    assert not bench.run.done()
