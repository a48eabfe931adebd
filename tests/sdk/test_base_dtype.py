"""Servers that keep the base model in fewer bits train, sample, crash and restore as others do."""

import os
import signal
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import tinker
from tinker import types

from spmd_tx.coordinator.wire.checkpoint_paths import parse
from spmd_tx.demo import tiny_model
from spmd_tx.exports.merged import export_merged
from spmd_tx.models.declared.encoding import BASE_DTYPES
from spmd_tx.sharding.mesh import make_mesh
from tests.sdk import examples
from tests.sdk.examples import CONTEXT, VOCABULARY, logprobs_of, random_tokens, supervised, train
from tests.sdk.server import BASE_MODEL, Server, serving
from tests.sdk.test_packed_experts import LARGE, PATIENCE, SIZES, results
from tests.support import encoded_models
from tests.support.family_logits import logits

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SPEC = tiny_model.Spec(vocab_size=VOCABULARY, max_positions=CONTEXT, d_model=128, d_ff=256)
TEXT = random_tokens(40, seed=5)
STEPS, STEP = 12, types.AdamParams(learning_rate=0.01)
MOST = {"int8": 0.002, "fp8": 0.02, "int4": 0.05}  # nats per token that a loss may differ


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("model"), SPEC)


@pytest.fixture(scope="module")
def trained(model, tmp_path_factory):
    """A model that has learned a text half, and its loss per token."""
    folder = tmp_path_factory.mktemp("trained")
    with serving(model, folder / "data") as server:
        server.wait_until_ready()
        with tinker.ServiceClient(base_url=server.url, api_key="tml-test") as service:
            trainer = service.create_lora_training_client(BASE_MODEL, rank=8, seed=1).result(PATIENCE)
            losses = [train(trainer, [supervised(TEXT)], adam=STEP) for _ in range(STEPS)]
            assert losses[-1] < 0.6 * losses[0]
            path = trainer.save_weights_for_sampler("trained").result(PATIENCE).path
    export_merged(parse(path).folder(folder / "data" / "checkpoints"), model, folder / "merged", None)
    return folder / "merged"


def loss_of(path, base_dtype):
    """Per token, in nats."""
    found = logits(make_mesh(1, 1, 1), path, np.array(TEXT, np.int32), base_dtype=base_dtype)
    found = found[:-1] - np.logaddexp.reduce(found[:-1], axis=-1, keepdims=True)
    return -found[np.arange(len(TEXT) - 1), TEXT[1:]].mean()


@pytest.mark.parametrize("base_dtype", BASE_DTYPES)
def test_a_trained_model_loses_little(trained, base_dtype):
    found, expected = loss_of(trained, base_dtype), loss_of(trained, "auto")
    print(f"{base_dtype}: {found:.4f} nats per token, as stored {expected:.4f}")
    assert found != expected
    assert abs(found - expected) < MOST[base_dtype]


@pytest.mark.parametrize(
    "base_dtype, kind, mesh",
    [
        ("int8", {}, {"fully_sharded_data_parallel_size": 2, "shard_base_weights": "yes"}),
        ("fp8", {}, {"tensor_parallel_size": 2}),
        ("int4", {}, {"tensor_parallel_size": 2}),
        ("int4", {"n_experts": 8}, {"expert_parallel_size": 2}),
        ("int8", {"family": "qwen3_5"}, {"tensor_parallel_size": 2}),
        ("fp8", {"family": "llama"}, {}),
    ],
    ids=["int8-fsdp", "fp8-tp", "int4-tp", "int4-experts-ep", "int8-qwen3_5", "fp8-llama"],
)
def test_sampling_is_training_and_a_crash_changes_nothing(base_dtype, kind, mesh, tmp_path, monkeypatch):
    """What is sampled has the log-probabilities that training gives after the worker was killed."""
    monkeypatch.setattr(examples, "SECONDS", PATIENCE)
    model = tiny_model.write(tmp_path / "model", replace(SPEC, **kind))
    with serving(model, tmp_path / "data", base_dtype=base_dtype, **mesh) as server:
        server.wait_until_ready()
        results(server)


@pytest.mark.parametrize("encoding, base_dtype", [("fp8", "int4"), ("mxfp4", "int8"), ("int4", "fp8")])
def test_a_base_that_is_stored_encoded_is_kept_in_other_bits(encoding, base_dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(examples, "SECONDS", PATIENCE)
    model = tiny_model.write(tmp_path / "model", SPEC)
    # Numbers share a scale in groups, of which matrices have whole ones only.
    whole = {"v_head_dim": 16, "q_lora_rank": 64, "kv_lora_rank": 64}
    encoded_models.write(model, encoding, **SIZES, **LARGE, **({} if encoding == "mxfp4" else whole))
    with serving(model, tmp_path / "data", base_dtype=base_dtype) as server:
        server.wait_until_ready()
        results(server)


def test_steps_of_a_crash_are_not_run_again_with_other_numbers(model, tmp_path):
    """A server that was killed starts as before only; one that was stopped takes what it is given."""
    places = (model, tmp_path / "data")
    with ExitStack() as servers:  # the client's session ends before the last one

        def start(**options: object) -> Server:
            server = servers.enter_context(serving(*places, **options))
            server.wait_until_ready()
            return server

        first = start()
        port = first.url.rpartition(":")[2]
        with tinker.ServiceClient(base_url=first.url, api_key="tml-test") as service:
            trainer = service.create_lora_training_client(BASE_MODEL, rank=8, seed=1).result(PATIENCE)
            train(trainer, [supervised(TEXT)], adam=STEP)
            os.kill(first.process.pid, signal.SIGKILL)
            first.wait()
            with serving(*places, base_dtype="int8") as refused:
                assert refused.wait() == 2
                assert "--base-dtype was auto at the last start and is int8 now; but 2 train" in refused.log
            before = start(port=port)
            expected = logprobs_of(trainer, [supervised(TEXT)])
            assert before.terminate() == 0
            after = start(port=port, base_dtype="int8")
            found = logprobs_of(trainer, [supervised(TEXT)])
            assert 0 < np.abs(found - expected).max() < 0.1
            assert "models continue, but with other numbers" in after.log
