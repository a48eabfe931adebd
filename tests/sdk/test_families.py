"""Every family behind the real SDK: trained, and sampled with the log-probabilities that training has."""

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import pytest
import tinker
from tinker import types

from spmd_tx.demo import tiny_model
from tests.golden import families
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

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PROMPT = random_tokens(70, seed=0)  # longer than a window, and than a page
STEP = types.AdamParams(learning_rate=0.02)
SIZES = {"vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT}
WINDOWS = {  # they are served up to them only
    "mistral": {"sliding_window": CONTEXT},
    "phi3_longrope": {"original_max_position_embeddings": CONTEXT},
}


@pytest.fixture(scope="module", params=families.CONFIGS)
def server(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    model = tiny_model.write(path / "model", tiny_model.Spec(vocab_size=VOCABULARY, max_positions=CONTEXT))
    families.write(model, request.param, **SIZES, **WINDOWS.get(request.param, {}))
    with serving(model, path / "data", tensor_parallel_size=2) as server:
        server.wait_until_ready()
        yield server


def test_samples_have_the_probabilities_that_training_computes(server):
    with tinker.ServiceClient(base_url=server.url, api_key="tml-test") as service:
        trainer = service.create_lora_training_client(BASE_MODEL, rank=8, seed=1).result(SECONDS)
        losses = [train(trainer, batch(seed=3), adam=STEP) for _ in range(3)]
        assert losses[-1] < losses[0]
        sampler = trainer.save_weights_and_get_sampling_client().result(SECONDS)
        prompt = PROMPT
        for seed in range(2):  # the second one continues the first behind a prefix
            answer = sample(sampler, prompt, drawn(max_tokens=24, seed=seed))
            trained = logprobs_of(trainer, [supervised([*prompt, *answer.tokens])])[-24:]
            np.testing.assert_allclose(answer.logprobs, trained, rtol=0, atol=2e-4)
            prompt = [*prompt, *answer.tokens]
        asked = types.ModelInput.from_ints(prompt), 4, drawn(max_tokens=24, seed=2)
        for each in sampler.sample(*asked).result(SECONDS).sequences:
            trained = logprobs_of(trainer, [supervised([*prompt, *each.tokens])])[-len(each.tokens) :]
            np.testing.assert_allclose(each.logprobs, trained, rtol=0, atol=2e-4)


def trained(url: str, interrupt: Callable[[str], None]) -> tuple[list[float], list[list[float]]]:
    """Train and sample, and interrupt a step and the sampling; (log-probabilities, tokens of samples)."""
    with tinker.ServiceClient(base_url=url, api_key="tml-test") as service:
        trainer = service.create_lora_training_client(BASE_MODEL, rank=8, seed=1).result(SECONDS)
        for step in range(5):
            gradient = trainer.forward_backward(batch(seed=step), "cross_entropy")
            update = trainer.optim_step(STEP)
            if step == 3:
                interrupt("training")
            gradient.result(SECONDS)
            update.result(SECONDS)
        sampler = trainer.save_weights_and_get_sampling_client().result(SECONDS)
        asked = sampler.sample(types.ModelInput.from_ints(PROMPT), 2, drawn(max_tokens=24, seed=1))
        interrupt("sampling")
        drew = [list(each.tokens) for each in asked.result(SECONDS).sequences]
        return list(logprobs_of(trainer, batch(seed=9))), drew


def not_at_all(_: str) -> None:
    """Let a run go on."""


STATEFUL = ["qwen3_5", "glm4_moe_lite", "gpt_oss"]  # states, latents, windows


@pytest.mark.parametrize("server", STATEFUL, indirect=True)
def test_a_run_whose_workers_are_killed_ends_bit_for_bit(server):
    def kill(_: str) -> None:
        os.kill(server.worker_pids()[0], signal.SIGKILL)

    assert trained(server.url, kill) == trained(server.url, not_at_all)


@pytest.mark.parametrize("family", STATEFUL)
def test_a_run_whose_server_is_killed_ends_bit_for_bit(family, tmp_path):
    model = tiny_model.write(
        tmp_path / "model", tiny_model.Spec(vocab_size=VOCABULARY, max_positions=CONTEXT)
    )
    families.write(model, family, **SIZES)
    with ExitStack() as servers:
        started = [servers.enter_context(serving(model, tmp_path / "data"))]
        started[0].wait_until_ready()
        expected = trained(started[0].url, not_at_all)

        def kill(_: str) -> None:
            os.kill(started[-1].process.pid, signal.SIGKILL)
            started[-1].process.wait()
            port = started[-1].url.rpartition(":")[2]
            started.append(servers.enter_context(serving(model, tmp_path / "data", port=port)))

        assert trained(started[0].url, kill) == expected
    assert len(started) == 3


def test_latent_attention_runs_on_base_weights_that_are_split_over_fsdp(tmp_path):
    path = tiny_model.write(tmp_path / "model", tiny_model.Spec(vocab_size=VOCABULARY, max_positions=CONTEXT))
    families.write(path, "glm4_moe_lite", **SIZES)
    split = {"fully_sharded_data_parallel_size": 2, "shard_base_weights": "yes"}
    with serving(path, tmp_path / "data", **split) as server:
        server.wait_until_ready()
        with tinker.ServiceClient(base_url=server.url, api_key="tml-test") as service:
            trainer = service.create_lora_training_client(BASE_MODEL, rank=8, seed=1).result(SECONDS)
            losses = [train(trainer, batch(seed=3), adam=STEP) for _ in range(3)]
            assert losses[-1] < losses[0]
            sampler = trainer.save_weights_and_get_sampling_client().result(SECONDS)
            answer = sample(sampler, PROMPT, drawn(max_tokens=24, seed=0))
            trained = logprobs_of(trainer, [supervised([*PROMPT, *answer.tokens])])[-24:]
            np.testing.assert_allclose(answer.logprobs, trained, rtol=0, atol=2e-4)
