"""A mixture of experts behind the real SDK: trained, sampled, and trained with the experts that sampled."""

import os
import signal

import numpy as np
import pytest
import tinker
from tinker import types

from spmd_tx.demo import tiny_model
from tests.sdk.examples import (
    CONTEXT,
    SECONDS,
    VOCABULARY,
    batch,
    drawn,
    logprobs_of,
    random_tokens,
    sample,
    supervised,
    train,
)
from tests.sdk.server import BASE_MODEL, serving

SPEC = tiny_model.Spec(
    n_heads=4, n_kv_heads=2, d_ff=32, n_experts=8, vocab_size=VOCABULARY, max_positions=CONTEXT
)
PROMPT = random_tokens(10, seed=0)
LARGE_STEP = types.AdamParams(learning_rate=0.05)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    model = tiny_model.write(tmp_path_factory.mktemp("mixture") / "model", SPEC)
    data_dir = tmp_path_factory.mktemp("mixture") / "data"
    sizes = {"fully_sharded_data_parallel_size": 2, "expert_parallel_size": 2}
    with serving(model, data_dir, **sizes, shard_base_weights="yes") as server:
        server.wait_until_ready()
        yield server


def with_its_origin(tokens: list[int], answer: types.SampledSequence) -> types.Datum:
    count = len(answer.tokens)

    def spans(prompt: int, sampled: int) -> list[types.PromptProvenanceSpan | types.SampledProvenanceSpan]:
        return [
            types.PromptProvenanceSpan(sequence_id=answer.sequence_id, length=prompt),
            types.SampledProvenanceSpan(sequence_id=answer.sequence_id, length=sampled),
        ]

    inputs, targets = spans(len(PROMPT), count - 1), spans(len(PROMPT) - 1, count)
    return supervised(tokens).with_provenance(inputs, targets)


@pytest.mark.slow
def test_training_replays_the_experts_that_sampled_and_does_so_after_a_crash(server):
    with tinker.ServiceClient(base_url=server.url, api_key="tml-test") as service:
        trainer = service.create_lora_training_client(BASE_MODEL, rank=8, seed=1).result(SECONDS)
        sampler = trainer.save_weights_and_get_sampling_client().result(SECONDS)
        answer = sample(sampler, PROMPT, drawn(max_tokens=24, seed=5))
        tokens = PROMPT + answer.tokens
        plain, named = [supervised(tokens)], [with_its_origin(tokens, answer)]
        fresh = logprobs_of(trainer, named)
        np.testing.assert_array_equal(fresh, logprobs_of(trainer, plain))
        np.testing.assert_allclose(fresh[len(PROMPT) - 1 :], answer.logprobs, rtol=0, atol=1e-4)

        losses = [train(trainer, batch(seed=0), adam=LARGE_STEP) for _ in range(4)]
        assert losses[-1] < losses[0]
        free, replayed = logprobs_of(trainer, plain), logprobs_of(trainer, named)
        assert np.abs(free - replayed).max() > 1e-3  # the router of today would choose others

        os.kill(server.worker_pids()[0], signal.SIGKILL)
        np.testing.assert_array_equal(logprobs_of(trainer, named), replayed)
        np.testing.assert_array_equal(logprobs_of(trainer, plain), free)
        assert sample(sampler, PROMPT, drawn(max_tokens=24, seed=5)).tokens == answer.tokens
