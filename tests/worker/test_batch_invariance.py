"""With the option, a request gets the same bits alone, in company, behind a hit and after interruptions.

The coordinator's batch and the engine run in one process.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.coordinator.wire import tinker_pb2
from spmd_tx.demo import tiny_model
from spmd_tx.protocol.commands import AdapterSpec, Decode, Prefill
from spmd_tx.worker.engine import Engine
from spmd_tx.worker.programs.compiled import Programs
from spmd_tx.worker.steps.speculate import Speculation
from tests.support.in_process_sampler import Sampler
from tests.support.tiny_setup import tiny_setup

DENSE = tiny_model.Spec(
    n_layers=2,
    d_model=128,
    n_heads=4,
    n_kv_heads=2,
    head_dim=32,
    d_ff=256,
    vocab_size=512,
    max_positions=256,
    std=0.1,
)
MIXTURE = replace(DENSE, n_experts=4, experts_per_token=2, d_ff=64)
WINDOWS = replace(DENSE, family="gpt_oss", d_ff=64)
LINEAR = replace(DENSE, family="qwen3_5")
SPECS = {"dense": DENSE, "mixture": MIXTURE, "windows": WINDOWS, "linear": LINEAR}
CONTEXT, PAGE_SIZE, ROWS, STEPS, BANK_SLOTS, VERSIONS = 256, 16, 32, 8, 5, 3
LEAST_PAGES = CONTEXT // PAGE_SIZE + 3
ADAPTER = AdapterSpec(rank=32)  # smaller ones have sums so short that their place changes no bit


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(((1, 1, 1), "dense"), id="one device", marks=pytest.mark.slow),
        pytest.param(((2, 1, 2), "dense"), id="fsdp and tp"),
        pytest.param(((1, 2, 1), "mixture"), id="experts", marks=pytest.mark.slow),
        pytest.param(((1, 1, 2), "windows"), id="windows", marks=pytest.mark.slow),
        pytest.param(((1, 1, 2), "linear"), id="linear", marks=pytest.mark.slow),
        pytest.param(((1, 1, 1), "linear"), id="linear, one device", marks=pytest.mark.slow),
        pytest.param(((1, 1, 1), "windows"), id="windows, one device", marks=pytest.mark.slow),
    ],
)
def engine(request, tmp_path_factory):
    (fsdp, ep, tp), kind = request.param
    model_dir = tmp_path_factory.mktemp(kind)
    tiny_model.write(model_dir, SPECS[kind])
    sizes = {"max_context": CONTEXT, "page_size": PAGE_SIZE, "decode_steps": STEPS, "max_rank": ADAPTER.rank}
    setup = tiny_setup(
        model_dir=str(model_dir),
        fsdp=fsdp,
        ep=ep,
        tp=tp,
        adapter_slots=VERSIONS,
        bank_slots=BANK_SLOTS,
        decode_rows=ROWS,
        kv_cache_tokens=8192,
        batch_invariant=True,
        **sizes,
    )
    engine = Engine.start(setup, Programs(lambda what: None), lambda what: None)
    # B is zero in fresh adapters, and an adapter that does nothing would prove nothing.
    chance = np.random.default_rng(0)
    engine.state.train = engine.state.train.replace(
        w=jax.tree.map(
            lambda leaf: jax.device_put(chance.normal(0, 0.1, leaf.shape).astype(leaf.dtype), leaf.sharding),
            engine.state.train.w,
        ),
        scale=jax.device_put(np.ones_like(engine.state.train.scale), engine.state.train.scale.sharding),
    )
    return engine


def sampler_of(engine, pages=0, versions=tuple(range(VERSIONS)), **shapes):
    return Sampler(engine, ADAPTER, versions, pages=pages, **shapes)


def prompt_of(seed, length):
    return np.random.default_rng(seed).integers(0, DENSE.vocab_size, length).tolist()


PROMPT, TOKENS = prompt_of(1, 150), 40


def ask(sampler, **options):
    sampler.ask("ours", PROMPT, TOKENS, version=1, seed=5, **options)


@pytest.fixture(scope="module")
def alone(engine):
    sampler = sampler_of(engine)
    ask(sampler)
    sampler.run()
    return sampler.answer("ours")


def test_it_gets_the_same_again(engine, alone):
    sampler = sampler_of(engine)
    ask(sampler)
    sampler.run()
    assert sampler.answer("ours") == alone


def test_in_the_company_of_other_adapters_in_several_blocks(engine, alone):
    sampler = sampler_of(engine)
    for number in range(22):
        version = (None, *range(VERSIONS))[number % (VERSIONS + 1)]
        prompt = prompt_of(100 + number, 3 + 9 * number)
        sampler.ask(f"before {number}", prompt, 12 + 2 * number, version, top_k=number + 1, top_p=0.9)
    for _ in range(8):
        sampler.turn()
    ask(sampler)
    for number in range(12):
        sampler.ask(f"after {number}", prompt_of(200 + number, 70), 30, number % VERSIONS, temperature=0.5)
    sampler.run()
    rows = max(len(command.source) for command in sampler.commands if isinstance(command, Decode))
    assert rows > 16  # more than a block
    assert sampler.answer("ours") == alone


def test_with_its_adapter_in_another_slot_of_the_bank(engine, alone):
    sampler = sampler_of(engine, versions=(1, 2, 0))
    ask(sampler)
    sampler.ask("other", prompt_of(2, 60), 50, version=0)
    sampler.run()
    assert sampler.answer("ours") == alone


def test_behind_pages_that_other_requests_have_read(engine, alone):
    sampler = sampler_of(engine)
    # The first answer goes on as the prompt does, but what a Decode has written is not used.
    sampler.ask("stem", PROMPT[:140], 30, version=1)
    sampler.run()
    ask(sampler)
    sampler.run()
    keeps_states = engine.model.stateful is not None  # then the option leaves no prefixes
    assert sampler.results["ours"].prompt_cache_hit_tokens == (0 if keeps_states else 128)
    assert sampler.answer("ours") == alone


def test_after_it_was_preempted(engine, alone):
    sampler = sampler_of(engine, pages=LEAST_PAGES)
    shards = engine.setup.fsdp * engine.setup.ep
    for number in range(2 * shards):
        sampler.ask(f"first {number}", prompt_of(50 + number, 20), 200, version=(2, 0)[number % 2])
    sampler.turn()
    ask(sampler)
    sampler.run()
    forced = [command.forced for command in sampler.commands if isinstance(command, Decode)]
    assert any((each >= 0).any() for each in forced), "nobody was preempted"
    assert sampler.answer("ours") == alone


def test_after_the_workers_were_lost(engine, alone):
    first = sampler_of(engine)
    ask(first)
    for number in range(5):
        first.ask(f"{number}", prompt_of(number, 30), 60, version=0)
    while not first.batch.unanswered()["ours"].samples[0].tokens:
        first.turn()
    job = first.batch.unanswered()["ours"]
    known = len(job.samples[0].tokens)
    assert 0 < known < TOKENS
    second = sampler_of(engine, versions=(2, 0, 1))
    second.batch.resume(job)
    second.run()
    assert second.answer("ours") == alone
    # Only the prompt was read; the rest was fed to Decodes.
    positions = [command.rows.positions.max() for command in second.commands if isinstance(command, Prefill)]
    assert max(positions) == len(PROMPT) - 2


def test_prompt_logprobs_and_top_tokens_do_not_depend_on_company_either(engine):
    wishes = {"prompt_logprobs": True, "topk_prompt_logprobs": 3, "topk_sample_logprobs": 2}
    lonely = sampler_of(engine)
    ask(lonely, **wishes)
    lonely.run()
    sampler = sampler_of(engine)
    for number in range(6):
        sampler.ask(
            f"{number}", prompt_of(number, 80), 30, number % VERSIONS, prompt_logprobs=number % 2 == 0
        )
    ask(sampler, **wishes)
    sampler.run()
    assert sampler.answer("ours") == lonely.answer("ours")


def speculate(engine, alone, wrong=0, right_before=32):
    """Return a sampler that has answered with an earlier answer, of which every ``wrong``th token is.

    Drafts of the session were right so often. If none was, they are first compared with what is drawn.
    """
    sampler = sampler_of(engine, speculates=True)
    (sequence,) = tinker_pb2.SampleResponse.FromString(alone).sequences
    tokens = np.frombuffer(sequence.tokens, np.int32).copy()
    if wrong:
        tokens[wrong - 1 :: wrong] += 1
    texts = sampler.batch._guesses._texts.of("ours", PROMPT)
    texts.put(("earlier", 0), tokens.tolist())
    texts.record.note(right=right_before, wrong=0)
    ask(sampler)
    sampler.run()
    return sampler


@pytest.mark.parametrize("wrong", [0, 3, 5])
def test_it_speculates_and_draws_the_same(engine, alone, wrong):
    sampler = speculate(engine, alone, wrong)
    assert sampler.answer("ours") == alone
    steps = [command.steps for command in sampler.commands if isinstance(command, Decode)]
    followers = [command.depths.any() for command in sampler.commands if isinstance(command, Decode)]
    assert any(followers)
    assert sum(steps) < TOKENS


def test_it_begins_to_speculate_where_a_decode_goes_on(engine, alone):
    sampler = speculate(engine, alone, right_before=0)
    assert sampler.answer("ours") == alone
    decodes = [command for command in sampler.commands if isinstance(command, Decode)]
    leads = [command for command in decodes if command.depths.any()]
    assert any((command.source >= 0).any() for command in leads)


def test_a_state_that_was_not_rewound_would_be_noticed(engine, alone, monkeypatch):
    if not engine.model.linear_heads:
        pytest.skip("it keeps no states that every token changes")
    monkeypatch.setattr(Speculation, "_exchanged", lambda self, last_B: jnp.arange(last_B.size))
    forgetful = Engine.start(engine.setup, Programs(lambda what: None), lambda what: None)
    forgetful.state.train = engine.state.train
    assert speculate(forgetful, alone, 5).answer("ours") != alone
