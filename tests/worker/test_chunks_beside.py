"""A prompt that Decodes read beside other samples gives the answer and experts that a Prefill gives."""

import jax
import numpy as np
import pytest

from spmd_tx.demo import tiny_model
from spmd_tx.protocol.commands import AdapterSpec, Decode, Prefill
from spmd_tx.worker.engine import Engine
from spmd_tx.worker.programs.compiled import Programs
from tests.support.in_process_sampler import Sampler
from tests.support.tiny_setup import tiny_setup

pytestmark = pytest.mark.usefixtures("quickly_compiled")

DENSE = tiny_model.Spec(n_layers=2, d_model=32, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=64, vocab_size=320)
MIXTURE = tiny_model.Spec(**{**vars(DENSE), "n_experts": 4, "experts_per_token": 2, "d_ff": 32})
CONTEXT, VERSIONS, CHUNK = 128, 2, 16
ADAPTER = AdapterSpec(rank=4)
SAME = 2e-5  # nats
TOP = {"topk_sample_logprobs": 3}  # all ask for them: each other number would be more programs
FAST = 300.0  # tokens that are computed while the weights are read


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((MIXTURE, (1, 1, 1)), id="mixture on 1,1,1"),
        pytest.param((MIXTURE, (1, 2, 2)), id="mixture on 1,2,2", marks=pytest.mark.slow),
        pytest.param((DENSE, (1, 1, 1)), id="dense on 1,1,1", marks=pytest.mark.slow),
        pytest.param((DENSE, (2, 1, 2)), id="dense on 2,1,2", marks=pytest.mark.slow),
    ],
)
def engine(request, tmp_path_factory):
    spec, (fsdp, ep, tp) = request.param
    model_dir = tmp_path_factory.mktemp("model")
    tiny_model.write(model_dir, spec)
    setup = tiny_setup(
        model_dir=str(model_dir),
        fsdp=fsdp,
        ep=ep,
        tp=tp,
        adapter_slots=VERSIONS,
        bank_slots=VERSIONS + 2,
        max_rank=ADAPTER.rank,
        max_context=CONTEXT,
        page_size=8,
        kv_cache_tokens=1024,
        decode_rows=4,
        decode_steps=4,
    )
    engine = Engine.start(setup, Programs(lambda what: None), lambda what: None)
    chance = np.random.default_rng(0)  # B is zero in fresh adapters
    trained = engine.state.train
    engine.state.train = trained.replace(
        w=jax.tree.map(
            lambda leaf: jax.device_put(chance.normal(0, 0.3, leaf.shape).astype(leaf.dtype), leaf.sharding),
            trained.w,
        ),
        scale=jax.device_put(np.ones_like(trained.scale), trained.scale.sharding),
    )
    return engine


def prompt_of(seed, length):
    return np.random.default_rng(seed).integers(0, DENSE.vocab_size, length).tolist()


def answers(engine, ridge):
    """Let a long prompt of one adapter arrive while samples of another one and of the base model run."""
    sampler = Sampler(engine, ADAPTER, tuple(range(VERSIONS)), chunk_tokens=CHUNK, ridge=ridge)
    for number in range(2):
        sampler.ask(f"running {number}", prompt_of(number, 9), 50, (0, None)[number], seed=number, **TOP)
    for _ in range(6):
        sampler.turn()
    sampler.ask("long", prompt_of(7, 100), 8, 1, seed=7, num_samples=2, **TOP)
    job = sampler.batch.unanswered()["long"]
    sampler.run()
    sampler.ask("next turn", prompt_of(7, 110), 8, 1, seed=8, **TOP)
    sampler.run()
    return sampler, job


@pytest.fixture(scope="module")
def both(engine):
    return answers(engine, ridge=FAST), answers(engine, ridge=0.0)


def tokens_beside(sampler):
    chunks = [each.chunk for each in sampler.commands if isinstance(each, Decode) and each.chunk is not None]
    return sum(int((chunk.positions >= 0).sum()) for chunk in chunks)


def tokens_alone(sampler):
    return sum(int((each.rows.segments > 0).sum()) for each in sampler.commands if isinstance(each, Prefill))


def test_decodes_read_the_long_prompt(both):
    (beside, _), (alone, _) = both
    assert tokens_beside(beside) == 96  # 99, without the last tokens
    assert not tokens_beside(alone)
    assert tokens_alone(alone) == tokens_alone(beside) + 96


def test_everybody_gets_the_same(both):
    (beside, _), (alone, _) = both
    assert beside.results.keys() == alone.results.keys()
    for name, answer in beside.results.items():
        expected = alone.results[name]
        assert answer.prompt_cache_hit_tokens == expected.prompt_cache_hit_tokens
        for ours, theirs in zip(answer.sequences, expected.sequences, strict=True):
            assert ours.tokens == theirs.tokens, name
            found, wanted = (np.frombuffer(each.logprobs, np.float32) for each in (ours, theirs))
            np.testing.assert_allclose(found, wanted, rtol=0, atol=SAME, err_msg=name)


def test_experts_of_the_prompt_are_those_that_it_went_through(engine, both):
    (_, beside), (_, alone) = both
    if not engine.model.n_experts:
        assert beside.prompt_experts is alone.prompt_experts is None
        return
    assert beside.prompt_experts.shape[0] == 99
    assert np.array_equal(beside.prompt_experts, alone.prompt_experts)
