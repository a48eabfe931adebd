"""Weights from outside train and sample as if the server had trained them, through the real SDK."""

import os
import signal
from pathlib import Path

import httpx
import numpy as np
import pytest
import tinker

from spmd_tx.cli.import_weights import lora_config, upload
from spmd_tx.cli.server import Server
from spmd_tx.errors import StartError
from tests.sdk.examples import SECONDS, batch, greedy, logprobs_of, random_tokens, sample, train
from tests.sdk.server import BASE_MODEL, serving

QUESTION, PROMPT = batch(seed=9), random_tokens(10, seed=0)


@pytest.fixture
def trained(trainer):
    train(trainer, batch(seed=0))
    return trainer


@pytest.fixture
def folder(rest, trained, tmp_path) -> Path:
    """What a server has exported, on a client's disk."""
    exported = trained.save_weights_external("final").result(SECONDS).path
    for name, url in rest.get_external_weights_urls(exported).result(SECONDS).urls.items():
        (tmp_path / name).write_bytes(httpx.get(url).raise_for_status().content)
    return tmp_path


def test_weights_from_outside_train_and_sample_as_those_that_were_exported(
    live_server, service, trained, folder
):
    path = upload(Server(live_server.url, "tml-test"), folder)
    loaded = service.create_training_client_from_state(path).result(SECONDS)
    assert loaded.get_info().lora_rank == 8
    np.testing.assert_array_equal(logprobs_of(loaded, QUESTION), logprobs_of(trained, QUESTION))

    saved = trained.save_weights_for_sampler("v1").result(SECONDS).path
    samplers = [service.create_sampling_client(model_path=each).result(SECONDS) for each in (saved, path)]
    ours, theirs = (sample(sampler, PROMPT, greedy()) for sampler in samplers)
    assert ours.tokens == theirs.tokens
    assert ours.logprobs == theirs.logprobs

    fresh = service.create_training_client_from_state(
        trained.save_state("state").result(SECONDS).path
    ).result(SECONDS)
    for trainer in (loaded, fresh):
        train(trainer, batch(seed=1))
    np.testing.assert_array_equal(logprobs_of(loaded, QUESTION), logprobs_of(fresh, QUESTION))
    with pytest.raises(tinker.TinkerError, match="has no optimizer state"):
        service.create_training_client_from_state_with_optimizer(path).result(SECONDS)


def test_a_folder_that_does_not_fit_is_refused_in_words(live_server, folder, tmp_path):
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace('"tiny"', '"Qwen/Qwen3-4B"'))
    with pytest.raises(StartError, match=r"refuses this: .*'Qwen/Qwen3-4B', and the upload is for 'tiny'"):
        upload(Server(live_server.url, "tml-test"), folder)
    with pytest.raises(StartError, match=r"is not a PEFT folder: cannot read .*adapter_config.json"):
        lora_config(tmp_path / "nowhere")
    with pytest.raises(StartError, match=r"cannot reach http://127.0.0.1:9.*--url"):
        upload(Server("http://127.0.0.1:9", ""), folder)


@pytest.mark.slow  # a server of its own, which is killed
def test_an_upload_goes_on_after_the_server_was_killed_and_was_never_visible(model_dir, folder, tmp_path):
    content = (folder / "adapter_model.safetensors").read_bytes()
    half = len(content) // 2
    with serving(model_dir, tmp_path / "data") as server:
        server.wait_until_ready()
        api = httpx.Client(base_url=f"{server.url}/api/v1/", timeout=SECONDS)
        body = {"base_model": BASE_MODEL, "lora_config": lora_config(folder)}
        upload = api.post("external_weights_upload_start", json=body).raise_for_status().json()
        url = upload["urls"]["adapter_model.safetensors"]
        part = {"Content-Range": f"bytes 0-{half - 1}/{len(content)}"}
        assert api.put(url, content=content[:half], headers=part).status_code == 308
        os.kill(server.process.pid, signal.SIGKILL)
        port = server.url.rpartition(":")[2]
    with serving(model_dir, tmp_path / "data", port=port) as server:
        server.wait_until_ready()
        assert api.get("checkpoints").json()["checkpoints"] == []
        asked = api.put(url, headers={"Content-Range": f"bytes */{len(content)}"})
        assert asked.headers["range"] == f"bytes=0-{half - 1}"
        rest = {"Content-Range": f"bytes {half}-{len(content) - 1}/{len(content)}"}
        assert api.put(url, content=content[half:], headers=rest).status_code == 200
        config = (folder / "adapter_config.json").read_bytes()
        assert api.put(upload["urls"]["adapter_config.json"], content=config).status_code == 200
        finish = {"upload_id": upload["upload_id"]}
        path = (
            api.post("external_weights_upload_finish", json=finish).raise_for_status().json()["tinker_path"]
        )
        (listed,) = api.get("checkpoints").json()["checkpoints"]
        assert listed["tinker_path"] == path
    api.close()
