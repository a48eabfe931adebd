"""A layer that has been trained to expect a model's texts saves steps, and one that has not is given up."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from spmd_tx.models import head, mtp
from spmd_tx.models.adapters.lora import adapter_weights
from spmd_tx.models.adapters.row_lora import row_lora
from spmd_tx.models.backbone import backbone
from spmd_tx.models.forward_pass import Pass
from spmd_tx.models.named import Named
from spmd_tx.protocol.commands import REJECTED
from spmd_tx.protocol.kernels import Kernels
from spmd_tx.sharding.mesh import DATA
from spmd_tx.sharding.weight import specs
from spmd_tx.worker.engine import Engine
from spmd_tx.worker.programs.compiled import Programs
from spmd_tx.worker.steps.train import both_loras, own_adapters, segment_attend
from tests.golden.families import VOCABULARY
from tests.support.in_process_sampler import Sampler
from tests.support.mtp_models import write_to_be_trained
from tests.support.tiny_setup import tiny_setup
from tests.worker.test_mtp import SPECULATES, Watched

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TEXTS, LENGTH, PROMPT = 128, 64, 8  # of the training data, in tokens
STEPS, ROWS, RATE = 400, 16, 3e-3
TOKENS = 40


def prompt_of(seed):
    return np.random.default_rng(seed).integers(0, VOCABULARY, PROMPT).tolist()


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    setup = tiny_setup(
        model_dir=str(write_to_be_trained(tmp_path_factory.mktemp("model"), "glm4_moe")),
        speculation="mtp",
        max_context=LENGTH + PROMPT,
        kv_cache_tokens=8192,
        decode_rows=TEXTS,
        decode_steps=8,
    )
    return Engine.start(setup, Programs(lambda what: None), lambda what: None)


@pytest.fixture(scope="module")
def trained(engine):
    """The layer's weights after a few hundred steps of Adam on the model's own texts."""
    sampler = Sampler(engine, None, ())
    for seed in range(TEXTS):
        sampler.ask(f"{seed}", prompt_of(seed), LENGTH - PROMPT, None, temperature=1.0, seed=seed)
    sampler.run()
    answers = (sampler.results[f"{seed}"].sequences[0].tokens for seed in range(TEXTS))
    texts = [[*prompt_of(seed), *np.frombuffer(each, np.int32)] for seed, each in enumerate(answers)]
    return fit(engine, np.array(texts, np.int32))


def fit(engine, texts):
    """Fit what the layer expects to the token after the next one."""
    model, mesh, declared = engine.model, engine.mesh, engine.declared.base
    nothing = jax.tree.map(
        lambda weight: jnp.zeros(weight.shape, weight.dtype),
        adapter_weights(model, mesh, 1, 1, jnp.float32, zero=True),
    )

    @jax.jit
    @partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(specs(declared.mtp), specs(declared), jax.P(DATA)),
        out_specs=(jax.P(), specs(declared.mtp)),
    )
    def slope(w, base, tokens):
        rows, length = tokens.shape
        positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
        segments, slots = jnp.ones_like(tokens), jnp.zeros(rows, jnp.int32)
        loras = both_loras(partial(row_lora, kernels=Kernels()), slots, jnp.ones((1, 2), jnp.float32))
        attend = segment_attend(Kernels(), segments)
        how = Pass(attend, *loras, Kernels(), sequence_parallel=True, segments=segments)
        adapters = own_adapters(model, nothing)
        h, *_ = backbone(model, base, adapters, tokens, positions, how)

        def loss(w):
            further = jnp.roll(tokens, -1, axis=1)
            ahead, _ = mtp.read(model, base.replace(mtp=w), adapters, h, further, positions, how, None)
            logits = head.logits(base.unembed, adapters.head, how.apply_lora, ahead)
            logprobs = head.target_logprobs(logits, jnp.roll(tokens, -2, axis=1))
            return -lax.pmean(jnp.mean(logprobs[:, :-2]), DATA)

        return jax.value_and_grad(loss)(w)

    w = engine.state.base.mtp
    first = second = jax.tree.map(jnp.zeros_like, w)
    chance = np.random.default_rng(0)
    for step in range(1, STEPS + 1):
        loss, grad = slope(w, engine.state.base, texts[chance.integers(0, len(texts), ROWS)])
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grad)
        second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g**2, second, grad)
        rate = RATE * min(1.0, 2 * (1 - step / STEPS)) / (1 - 0.9**step)
        w = jax.tree.map(
            lambda w, m, v, rate=rate, step=step: w - rate * m / (jnp.sqrt(v / (1 - 0.99**step)) + 1e-8),
            *(w, first, second),
        )
        if step in (1, STEPS):
            print(f"loss of step {step}: {loss:.2f} nats")
    return w


@dataclass(frozen=True)
class Counts:
    """What came of new prompts: steps in which a row lived, and drafts."""

    steps: int
    right: int
    wrong: int


def sample(engine, mtp_weights: Named) -> Counts:
    """Sample with drafts, compare with plain steps, and count."""
    engine.state.base = engine.state.base.replace(mtp=mtp_weights)
    plain, ahead = Watched(engine, ()), Watched(engine, (), **SPECULATES)
    steps = right = wrong = 0
    for seed in range(8):
        prompt, name = prompt_of(1000 + seed), f"{seed}"
        expected, *_ = plain.answer_to(prompt, None, name, TOKENS)
        found, *_ = ahead.answer_to(prompt, None, name, TOKENS)
        np.testing.assert_array_equal(found, expected)
        for reply in ahead.replies:
            tokens = reply["tokens"]
            steps += int((tokens[:, 0] >= 0).sum())
            right += int((tokens[:, 1:] >= 0).sum())
            wrong += int((tokens[:, 1:] == REJECTED).sum())
    return Counts(steps, right, wrong)


def test_a_trained_layer_saves_steps(engine, trained):
    untrained = engine.state.base.mtp
    counts = sample(engine, trained)
    print(f"trained: {counts}")
    assert counts.right > 0.5 * (counts.right + counts.wrong)
    assert counts.steps < 0.75 * 8 * TOKENS
    counts = sample(engine, untrained)
    print(f"untrained: {counts}")
    assert counts.right < 0.2 * (counts.right + counts.wrong)
    assert counts.wrong < 8 * TOKENS / 4  # then it is given up
