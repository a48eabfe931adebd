"""Ten thousand samples of each family have the bits of plain steps where rows read ahead, and some on meshes.

    pytest -s -m slow tests/worker/test_speculated_bits.py

prints a line for each family: its samples, how many drafts were read and accepted, and what differs.
"""

from dataclasses import dataclass

import jax
import numpy as np
import pytest

from spmd_tx.coordinator.runtime import metrics
from spmd_tx.protocol.commands import AdapterSpec
from spmd_tx.worker.engine import Engine
from spmd_tx.worker.programs.compiled import Programs
from tests.golden.families import CONFIGS, VOCABULARY, write
from tests.support.in_process_sampler import Sampler
from tests.support.tiny_engine import mesh_name
from tests.support.tiny_setup import tiny_setup

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SAMPLES, ON_MESHES = 10_000, 400
OF_REQUEST, AT_ONCE = 6, 2  # requests at once, which leave rows to followers
PROMPTS, SESSIONS, VERSIONS = 60, 6, 2
TEMPERATURES = 0.0, 0.3, 0.7, 1.0
STOP = 5  # a token
ADAPTER = AdapterSpec(rank=8)
CASES = [
    *(pytest.param(family, (1, 1, 1), SAMPLES, id=family) for family in CONFIGS),
    *(
        pytest.param(family, shape, ON_MESHES, id=f"{family}-{mesh_name(shape)}")
        for family in ("qwen3_moe", "gpt_oss", "qwen3_5")  # that keep pages, rings and states
        for shape in ((1, 1, 2), (2, 2, 1))
    ),
]


@dataclass
class Drawn:
    """What a sampler has drawn, and how many drafts it has read for that."""

    answers: list[tuple[np.ndarray, np.ndarray]]  # tokens and log-probabilities of each sample
    drafted: int
    accepted: int


@pytest.mark.parametrize(("family", "shape", "samples"), CASES)
def test_samples_have_the_same_bits(family, shape, samples, tmp_path):
    engine = engine_of(write(tmp_path, family), shape, batch_invariant=True)
    plain, ahead = (sampled(engine, samples, speculates=speculates) for speculates in (False, True))
    pairs = list(zip(plain.answers, ahead.answers, strict=True))
    differing = [sum(not np.array_equal(one[n], other[n]) for one, other in pairs) for n in (0, 1)]
    tokens = sum(drawn.size for drawn, _ in ahead.answers)
    print(
        f"\n{family:14} {mesh_name(shape)}: {len(pairs)} samples of {tokens} tokens; {ahead.drafted} drafts,"
        f" {ahead.accepted} accepted; {differing[0]} with other tokens, {differing[1]} with other bits"
    )
    assert len(pairs) == samples
    assert 0 < ahead.accepted < ahead.drafted
    assert (plain.drafted, differing) == (0, [0, 0])


def engine_of(path, shape, **options) -> Engine:
    """Start an engine whose training slots hold adapters that do something."""
    fsdp, ep, tp = shape
    setup = tiny_setup(
        model_dir=str(path),
        fsdp=fsdp,
        ep=ep,
        tp=tp,
        adapter_slots=VERSIONS,
        bank_slots=1 + VERSIONS,
        max_rank=ADAPTER.rank,
        decode_rows=16,
        decode_steps=8,
        kv_cache_tokens=4096,
        **options,
    )
    engine = Engine.start(setup, Programs(lambda what: None), lambda what: None)
    chance, train = np.random.default_rng(0), engine.state.train
    w = jax.tree.map(
        lambda x: jax.device_put(chance.normal(0, 0.1, x.shape).astype(x.dtype), x.sharding), train.w
    )
    scale = jax.device_put(np.ones_like(train.scale), train.scale.sharding)
    engine.state.train = train.replace(w=w, scale=scale)
    return engine


def sampled(engine: Engine, samples: int, *, speculates: bool) -> Drawn:
    """Ask again and again for samples of some prompts, a few requests at a time."""
    sampler = Sampler(engine, ADAPTER, tuple(range(VERSIONS)), speculates=speculates)
    answers, before, chance = [], drafts(), np.random.default_rng(0)
    prompts = [chance.integers(0, VOCABULARY, length).tolist() for length in chance.integers(1, 40, PROMPTS)]
    at_once = AT_ONCE * engine.setup.fsdp * engine.setup.ep
    for first in range(0, samples, OF_REQUEST * at_once):
        asked = range(first, min(first + OF_REQUEST * at_once, samples), OF_REQUEST)
        for number in asked:
            prompt = int(chance.integers(PROMPTS))
            sampler.ask(
                f"{number}",
                prompts[prompt],
                int(chance.integers(6, 21)),
                (None, *range(VERSIONS))[prompt % (1 + VERSIONS)],
                temperature=TEMPERATURES[prompt % len(TEMPERATURES)],
                top_p=1.0 if prompt % 5 else 0.9,
                stop=[STOP],
                seed=number,
                num_samples=min(OF_REQUEST, samples - number),
                sampling_session_id=f"{prompt % SESSIONS}:sample:0",
            )
        sampler.run()
        sampler.commands.clear()
        for number in asked:
            for each in sampler.results.pop(f"{number}").sequences:
                answers.append(
                    (np.frombuffer(each.tokens, np.int32), np.frombuffer(each.logprobs, np.uint32))
                )
    drafted, accepted = (now - then for now, then in zip(drafts(), before, strict=True))
    return Drawn(answers, drafted, accepted)


def drafts() -> tuple[int, int]:
    """Return how many drafts were read in this process, and how many accepted."""
    counters = metrics.DRAFTED_TOKENS, metrics.ACCEPTED_TOKENS
    drafted, accepted = (int(each.labels(metrics.group())._value.get()) for each in counters)
    return drafted, accepted
