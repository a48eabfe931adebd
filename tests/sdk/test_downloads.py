"""Exports, downloads and copies through the real SDK and its command line."""

import json
from pathlib import Path

import httpx
import numpy as np
import pyrage
import pytest
import tinker
from safetensors.numpy import load

from tests.sdk.examples import SECONDS, batch, greedy, logprobs_of, random_tokens, sample, train
from tests.sdk.server import BASE_MODEL
from tests.support.hub import Hub, serving
from tests.support.sdk_process import run_python, run_tinker, run_tinker_anew

FILES = {"adapter_config.json", "adapter_model.safetensors"}
QUESTION = batch(seed=9)


@pytest.fixture
def trained(trainer):
    train(trainer, batch(seed=0))
    return trainer


@pytest.fixture
def command_line(live_server, tmp_path):
    place = {"TINKER_BASE_URL": live_server.url, "TINKER_API_KEY": "tml-test", "HOME": str(tmp_path)}

    def command_line(*words: str, **environment: str) -> dict:
        run = run_tinker_anew if environment else run_tinker
        printed = run("-f", "json", "checkpoint", *words, **place, **environment)
        return json.loads(printed[printed.index("{") :]) if "{" in printed else {}

    return command_line


def test_an_export_is_what_the_sampler_draws_from_as_files(rest, trained):
    exported = trained.save_weights_external("final", ttl_seconds=7200).result(SECONDS).path
    assert exported == f"tinker://{trained.get_info().model_id}/external_weights/final"
    answer = rest.get_external_weights_urls(exported).result(SECONDS)
    assert answer.urls.keys() == FILES
    url = answer.urls["adapter_model.safetensors"]
    whole = httpx.get(url).raise_for_status().content
    half = len(whole) // 2
    rest_of_it = httpx.get(url, headers={"range": f"bytes={half}-"})
    assert (rest_of_it.status_code, rest_of_it.content) == (206, whole[half:])
    tensors = load(whole)
    config = httpx.get(answer.urls["adapter_config.json"]).json()
    assert (config["r"], config["base_model_name_or_path"]) == (8, BASE_MODEL)
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"
    assert tensors[name].shape[1] == 8
    assert np.abs(tensors[name]).max() > 0
    (listed,) = rest.list_checkpoints(trained.get_info().model_id).result(SECONDS).checkpoints
    assert (listed.checkpoint_type, listed.size_bytes > len(whole)) == ("external", True)
    assert listed.expires_at is not None


def test_an_encrypted_export_is_readable_by_its_recipients_only(rest, trained):
    """As the cookbook's weights.download does it."""
    identity = pyrage.x25519.Identity.generate()
    saving = trained.save_weights_external("secret", age_encryption_recipients=[str(identity.to_public())])
    urls = rest.get_external_weights_urls(saving.result(SECONDS).path).result(SECONDS).urls
    assert urls.keys() == {f"{name}.age" for name in FILES}
    encrypted = httpx.get(urls["adapter_config.json.age"]).content
    assert json.loads(pyrage.decrypt(encrypted, [identity]))["r"] == 8
    with pytest.raises(tinker.RequestFailedError, match="is no public key"):
        trained.save_weights_external("wrong", age_encryption_recipients=["me"]).result(SECONDS)
    train(trained, batch(seed=1))  # it has harmed nobody


def test_the_command_line_downloads_a_training_checkpoint(command_line, rest, trained, tmp_path):
    saved = trained.save_state("state").result(SECONDS).path
    expected = trained.save_weights_external("expected").result(SECONDS).path
    urls = rest.get_external_weights_urls(expected).result(SECONDS).urls
    command_line("download", saved, "--output", str(tmp_path / "out"))
    (folder,) = (tmp_path / "out").iterdir()
    assert {path.name for path in folder.iterdir()} == FILES
    for name in FILES:
        assert (folder / name).read_bytes() == httpx.get(urls[name]).content
    newest = rest.list_training_runs(limit=1).result(SECONDS).training_runs[0]
    assert newest.user_metadata == {"created_by": "tinker checkpoint download"}
    assert rest.list_checkpoints(newest.training_run_id).result(SECONDS).checkpoints == []


def test_the_command_line_pushes_a_peft_adapter_to_the_hub(command_line, trained):
    saved = trained.save_state("state").result(SECONDS).path
    exported = trained.save_weights_external("final").result(SECONDS).path
    hub = Hub("hf_test")
    with serving(hub):
        hub_of = {"HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token, "HF_HUB_DISABLE_XET": "1"}
        for path, repository in ((exported, "alice/exported"), (saved, "alice/saved")):
            command_line("push-hf", path, "--repo", repository, **hub_of)
    for repository, path in (("alice/exported", exported), ("alice/saved", saved)):
        files = hub.files[repository]
        assert files.keys() == {*FILES, "README.md"}
        assert f"tinker_path: {path}" in files["README.md"].decode()
        assert f"- base_model:adapter:{BASE_MODEL}" in files["README.md"].decode()
        assert load(files["adapter_model.safetensors"])


def test_the_command_line_changes_and_deletes(command_line, rest, trained):
    run_id = trained.get_info().model_id
    path = trained.save_state("state").result(SECONDS).path
    trained.save_weights_for_sampler("sampled").result(SECONDS)
    command_line("publish", path)
    command_line("set-ttl", path, "--ttl", "3600")
    changed = command_line("info", path)
    assert (changed["public"], changed["expires_at"] is None, changed["lora_rank"]) == (True, False, 8)
    deleted = command_line("delete", "--run-id", run_id, "--type", "weights", "--yes")
    assert deleted == {"deleted_count": 1, "failed": []}
    (left,) = rest.list_checkpoints(run_id).result(SECONDS).checkpoints
    assert left.checkpoint_type == "sampler"


def test_a_copy_is_trained_and_sampled_like_its_source(live_server, service, trained):
    saved = trained.save_state("state").result(SECONDS).path
    sampled = trained.save_weights_for_sampler("sampled").result(SECONDS).path
    archive = tinker.ServiceClient(base_url=live_server.url, api_key="tml-test", project_id="archive")
    copies = [archive.copy_weights(path, ttl_seconds=3600).result(SECONDS) for path in (saved, sampled)]
    archive.close("success").result(SECONDS)
    resumed = service.create_training_client_from_state_with_optimizer(copies[0]).result(SECONDS)
    np.testing.assert_array_equal(logprobs_of(resumed, QUESTION), logprobs_of(trained, QUESTION))
    prompt = random_tokens(10, seed=0)
    own, copied = (
        sample(service.create_sampling_client(model_path=path).result(SECONDS), prompt, greedy())
        for path in (sampled, copies[1])
    )
    assert own.tokens == copied.tokens


def test_a_model_tells_the_rank_of_what_it_has_loaded(rest, new_trainer):
    small, large = new_trainer(rank=4), new_trainer(rank=8)
    saved = small.save_state("state").result(SECONDS).path
    with pytest.warns(FutureWarning, match="deprecated"):
        large.load_state(saved).result(SECONDS)
    run = rest.get_training_run(large.get_info().model_id).result(SECONDS)
    assert run.lora_rank == 4


def test_the_script_of_the_documents_runs(live_server, tmp_path):
    script = Path(__file__).parents[2] / "docs" / "examples" / "checkpoints.py"
    words = [live_server.url, BASE_MODEL, tmp_path / "adapter"]
    printed = run_python(script, *words, TINKER_API_KEY="tml-test")
    done = [line.partition(":")[0] for line in printed.splitlines()]
    assert done[:5] == ["resumed", "sampled", "copied", "downloaded", "downloaded"]
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == FILES
