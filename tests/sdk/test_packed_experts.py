"""Servers that keep experts as their checkpoint encodes them train and sample as others do, bit for bit."""

import os
import signal

import numpy as np
import pytest
import tinker
from tinker import types

from spmd_tx.demo import tiny_model
from tests.sdk import examples
from tests.sdk.examples import (
    CONTEXT,
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
from tests.support import encoded_models

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PATIENCE = 240  # seconds: programs of these models take long to compile
PROMPT = random_tokens(70, seed=0)  # longer than a window, and than a page
STEP = types.AdamParams(learning_rate=0.02)
SIZES = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}
# Large enough to run over the tokens that chose them only; those of FP8 are small, and run over all.
LARGE = {"hidden_size": 128, "moe_intermediate_size": 256, "intermediate_size": 256}
MESH = {
    "mxfp4": {"expert_parallel_size": 2},
    "fp8": {"expert_parallel_size": 2},
    "int4": {"tensor_parallel_size": 2},
}


def results(server):
    """Losses, log-probabilities and a sample; the worker is killed in between."""
    with tinker.ServiceClient(base_url=server.url, api_key="tml-test") as service:
        trainer = service.create_lora_training_client(BASE_MODEL, rank=8, seed=1).result(PATIENCE)
        losses = [train(trainer, batch(seed=3), adam=STEP) for _ in range(3)]
        assert losses[-1] < losses[0]
        sampler = trainer.save_weights_and_get_sampling_client().result(PATIENCE)
        answer = sample(sampler, PROMPT, drawn(max_tokens=24, seed=1))
        os.kill(server.worker_pids()[0], signal.SIGKILL)
        trained = logprobs_of(trainer, [supervised([*PROMPT, *answer.tokens])])
        np.testing.assert_allclose(answer.logprobs, trained[-24:], rtol=0, atol=2e-4)
        return losses, answer.tokens, answer.logprobs, trained


@pytest.mark.parametrize("encoding", encoded_models.MODELS)
def test_packed_experts_change_no_bit(encoding, tmp_path, monkeypatch):
    monkeypatch.setattr(examples, "SECONDS", PATIENCE)
    model = tiny_model.write(
        tmp_path / "model", tiny_model.Spec(vocab_size=VOCABULARY, max_positions=CONTEXT)
    )
    encoded_models.write(model, encoding, **SIZES, **({} if encoding == "fp8" else LARGE))
    found = []
    for way in ("packed", "unpacked"):
        with serving(model, tmp_path / way, expert_weights=way, **MESH[encoding]) as server:
            server.wait_until_ready()
            found.append(results(server))
    for packed, unpacked in zip(*found, strict=True):
        assert np.array_equal(packed, unpacked)
