"""A server that only samples: what was trained in its data directory before, and is trained again later."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest
import tinker
from tinker import types

from tests.sdk.examples import SECONDS, batch, drawn, logprobs_of, prompt, random_tokens, sample, train
from tests.sdk.server import BASE_MODEL, Server, serving
from tests.support.ports import free_port

PROMPT, QUESTION = random_tokens(10, seed=3), batch(seed=9)


class Alternating:
    """A data directory that is served to train, or only to sample, at one address."""

    def __init__(self, model_dir: Path, data_dir: Path, **options: object) -> None:
        self._model_dir, self._data_dir, self._options = model_dir, data_dir, options
        self._port = free_port()
        self._serving = None

    def start(self, role: str) -> Server:
        self.end()
        self._serving = serving(
            self._model_dir, self._data_dir, port=self._port, role=role, snapshot_seconds=0, **self._options
        )
        server = self._serving.__enter__()
        server.wait_until_ready()
        return server

    def end(self) -> None:
        if self._serving is not None:
            self._serving.__exit__(None, None, None)
            self._serving = None


@pytest.fixture
def alternating(model_dir: Path, tmp_path: Path) -> Iterator[Alternating]:
    servers = Alternating(model_dir, tmp_path / "data")
    yield servers
    servers.end()


@pytest.mark.slow
def test_what_was_trained_is_sampled_meanwhile_and_training_goes_on_to_the_bit(alternating):
    server = alternating.start("train")
    client = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
    trainer, twin = (
        client.create_lora_training_client(BASE_MODEL, rank=8, seed=1).result(SECONDS) for _ in range(2)
    )
    for seed in range(2):
        assert train(trainer, batch(seed)) == train(twin, batch(seed))
    path = trainer.save_weights_for_sampler("kept").result(SECONDS).path
    state = trainer.save_state("state").result(SECONDS).path
    unnamed = trainer.save_weights_and_get_sampling_client().result(SECONDS)
    named = client.create_sampling_client(model_path=path).result(SECONDS)
    drew = [sample(each, PROMPT, drawn()) for each in (unnamed, named)]
    train(twin, batch(2))
    expected = logprobs_of(twin, QUESTION)

    server = alternating.start("sample")
    assert "training slots" not in server.log
    for sampler, before in zip((unnamed, named), drew, strict=True):
        assert sample(sampler, PROMPT, drawn()).tokens == before.tokens
    (model,) = httpx.get(f"{server.url}/api/v1/get_server_capabilities").json()["supported_models"]
    assert (model["model_name"], model["trainable"], model["sampleable"]) == (BASE_MODEL, False, True)
    only_sampled = f"{BASE_MODEL} is only sampled from here; models that can be trained: none"
    with pytest.raises(tinker.APIStatusError, match=only_sampled):
        client.create_lora_training_client(BASE_MODEL, rank=8).result(SECONDS)
    with pytest.raises(tinker.APIStatusError, match=only_sampled):
        client.create_training_client_from_state(state).result(SECONDS)
    new = client.create_sampling_client(model_path=path).result(SECONDS)
    assert sample(new, PROMPT, drawn()).tokens == drew[1].tokens
    scores = new.compute_logprobs(prompt(PROMPT + drew[1].tokens)).result(SECONDS)
    np.testing.assert_allclose(scores[-len(drew[1].tokens) :], drew[1].logprobs, atol=1e-4)
    with openai.OpenAI(base_url=f"{server.url}/oai/api/v1", api_key="tml-test") as dialect:
        completion = dialect.completions.create(
            model=path, prompt=PROMPT, max_tokens=8, seed=0, extra_body={"return_token_ids": True}
        )
    assert completion.choices[0].token_ids == drew[1].tokens

    gradient, update = (
        trainer.forward_backward(batch(2), "cross_entropy"),
        trainer.optim_step(types.AdamParams(learning_rate=0.01)),
    )

    alternating.start("train")
    update.result(SECONDS)
    gradient.result(SECONDS)
    np.testing.assert_array_equal(logprobs_of(trainer, QUESTION), expected)
    assert sample(named, PROMPT, drawn()).tokens == drew[1].tokens
    client.close("success").result(SECONDS)


@pytest.mark.slow
def test_whole_models_are_sampled_without_room_for_training(model_dir, tmp_path):
    servers = Alternating(model_dir, tmp_path / "data", full_parameters=True)
    server = servers.start("train")
    client = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
    trainer = client.create_lora_training_client(BASE_MODEL, rank=0, seed=1).result(SECONDS)
    train(trainer, batch(0))
    path = trainer.save_weights_for_sampler("whole").result(SECONDS).path
    sampler = client.create_sampling_client(model_path=path).result(SECONDS)
    drew = sample(sampler, PROMPT, drawn())
    servers.start("sample")
    assert sample(sampler, PROMPT, drawn()).tokens == drew.tokens
    train_later = trainer.forward_backward(batch(1), "cross_entropy")
    servers.start("train")
    train_later.result(SECONDS)
    client.close("success").result(SECONDS)
    servers.end()
