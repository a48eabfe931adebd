"""Saving, resuming, exporting and listing through the real SDK, and checkpoints that were damaged."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tinker
from safetensors import safe_open

from spmd_tx.coordinator.checkpoints.files import MANIFEST
from spmd_tx.coordinator.wire.checkpoint_paths import parse
from tests.sdk.examples import (
    SECONDS,
    batch,
    gradient_norm,
    greedy,
    logprobs_of,
    prompt,
    random_tokens,
    sample,
    train,
)
from tests.sdk.server import BASE_MODEL
from tests.sdk.shared_servers import SPEC

PROMPT = random_tokens(10, seed=0)
QUESTION = batch(seed=9)


@pytest.fixture
def trained(trainer):
    for seed in range(2):
        train(trainer, batch(seed))
    return trainer


@pytest.fixture
def saved(trained) -> str:
    return trained.save_state("state").result(SECONDS).path


@pytest.fixture
def exported(trained) -> str:
    return trained.save_weights_for_sampler("v1").result(SECONDS).path


@dataclass
class Kept:
    """A trained model and its checkpoints, which nobody changes."""

    trainer: tinker.TrainingClient
    saved: str
    exported: str


@pytest.fixture(scope="module")
def kept(server) -> Iterator[Kept]:
    with tinker.ServiceClient(base_url=server.url, api_key="tml-test") as service:
        trainer = service.create_lora_training_client(BASE_MODEL, rank=8, seed=1).result(SECONDS)
        train(trainer, batch(seed=0))
        saving, exporting = trainer.save_state("state"), trainer.save_weights_for_sampler("v1")
        yield Kept(trainer, saving.result(SECONDS).path, exporting.result(SECONDS).path)


@pytest.fixture
def plain_state(trainer) -> str:
    """Of a model that has learned nothing."""
    return trainer.save_state("state").result(SECONDS).path


@pytest.fixture
def plain_export(trainer) -> str:
    return trainer.save_weights_for_sampler("v1").result(SECONDS).path


def folder_of(server, path: str) -> Path:
    return parse(path).folder(server.data_dir / "checkpoints")


def test_training_goes_on_from_a_saved_state_as_if_nothing_had_happened(service, trained, saved):
    resumed = service.create_training_client_from_state_with_optimizer(saved).result(SECONDS)
    np.testing.assert_array_equal(logprobs_of(resumed, QUESTION), logprobs_of(trained, QUESTION))
    assert resumed.get_info().lora_rank == 8
    for trainer in (trained, resumed):
        train(trainer, batch(seed=2))
    np.testing.assert_array_equal(logprobs_of(resumed, QUESTION), logprobs_of(trained, QUESTION))


def test_without_the_optimizer_only_the_weights_come_back(service, trained, saved):
    expected = logprobs_of(trained, QUESTION)
    fresh = service.create_training_client_from_state(saved).result(SECONDS)
    with pytest.warns(FutureWarning, match="deprecated"):
        trained.load_state(saved).result(SECONDS)
    full = service.create_training_client_from_state_with_optimizer(saved).result(SECONDS)
    trainers = fresh, trained, full
    for trainer in trainers:
        np.testing.assert_array_equal(logprobs_of(trainer, QUESTION), expected)
        train(trainer, batch(seed=2))
    by_fresh, by_trained, by_full = (logprobs_of(trainer, QUESTION) for trainer in trainers)
    np.testing.assert_array_equal(by_fresh, by_trained)
    assert np.abs(by_full - by_fresh).max() > 1e-4


def test_a_saved_state_is_not_changed_by_further_training(service, trained, saved):
    expected = logprobs_of(trained, QUESTION)
    train(trained, batch(seed=2))
    resumed = service.create_training_client_from_state(saved).result(SECONDS)
    np.testing.assert_array_equal(logprobs_of(resumed, QUESTION), expected)


def test_loading_drops_the_gradient_that_had_accumulated(trained, saved):
    trained.forward_backward(batch(seed=2), "cross_entropy").result(SECONDS)
    with pytest.warns(FutureWarning, match="deprecated"):
        trained.load_state_with_optimizer(saved).result(SECONDS)
    assert gradient_norm(trained) == 0


def test_a_named_sampler_checkpoint_is_a_peft_folder(server, kept):
    assert kept.exported == f"tinker://{kept.trainer.get_info().model_id}/sampler_weights/v1"
    run = kept.trainer.get_info().model_id.replace(":", "_")
    folder = server.data_dir / "checkpoints" / run / "sampler_weights" / "v1"
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 8, 32)
    with safe_open(folder / "adapter_model.safetensors", "np") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    width, heads = SPEC.d_model, SPEC.n_heads * SPEC.head_dim
    for name, out_features, in_features in [
        ("layers.0.self_attn.q_proj", heads, width),
        ("layers.1.self_attn.v_proj", SPEC.n_kv_heads * SPEC.head_dim, width),
        ("layers.1.self_attn.o_proj", width, heads),
        ("layers.0.mlp.down_proj", width, SPEC.d_ff),
    ]:
        assert shapes[f"base_model.model.model.{name}.lora_A.weight"] == (8, in_features)
        assert shapes[f"base_model.model.model.{name}.lora_B.weight"] == (out_features, 8)


def test_a_named_sampler_checkpoint_is_sampled_by_its_path(service, other_service, trained, exported):
    own = trained.save_weights_and_get_sampling_client().result(SECONDS)
    expected = sample(own, PROMPT, greedy())
    train(trained, batch(seed=2))
    for client in (service, other_service):
        sampler = client.create_sampling_client(model_path=exported).result(SECONDS)
        assert sampler.get_base_model() == BASE_MODEL
        answer = sample(sampler, PROMPT, greedy())
        assert answer.tokens == expected.tokens
        np.testing.assert_allclose(answer.logprobs, expected.logprobs, atol=1e-6)


def test_overwriting_replaces_a_checkpoint(service, trained, saved):
    train(trained, batch(seed=2))
    with pytest.raises(tinker.RequestFailedError, match="exists; choose another name") as caught:
        trained.save_state("state").result(SECONDS)
    assert caught.value.category == tinker.types.RequestErrorCategory.User
    assert trained.save_state("state", overwrite=True).result(SECONDS).path == saved
    resumed = service.create_training_client_from_state(saved).result(SECONDS)
    np.testing.assert_array_equal(logprobs_of(resumed, QUESTION), logprobs_of(trained, QUESTION))


def test_the_rest_client_lists_what_is_there(rest, kept):
    run_id, saved, exported = kept.trainer.get_info().model_id, kept.saved, kept.exported
    run = rest.get_training_run(run_id).result(SECONDS)
    assert (run.base_model, run.lora_rank) == (BASE_MODEL, 8)
    assert run.last_checkpoint.tinker_path == saved
    assert run.last_sampler_checkpoint.tinker_path == exported
    listed = rest.list_checkpoints(run_id).result(SECONDS).checkpoints
    assert {checkpoint.tinker_path for checkpoint in listed} == {saved, exported}
    assert all(checkpoint.size_bytes > 0 for checkpoint in listed)
    runs = rest.list_training_runs(limit=100).result(SECONDS).training_runs
    assert run_id in {each.training_run_id for each in runs}
    assert rest.get_weights_info_by_tinker_path(saved).result(SECONDS).lora_rank == 8


def test_a_deleted_checkpoint_is_gone(server, service, rest, saved, exported):
    for path in (saved, exported):
        rest.delete_checkpoint_from_tinker_path(path).result(SECONDS)
        assert not folder_of(server, path).exists()
    with pytest.raises(tinker.NotFoundError, match="does not exist"):
        service.create_training_client_from_state(saved).result(SECONDS)
    with pytest.raises(tinker.NotFoundError, match="does not exist"):
        service.create_sampling_client(model_path=exported).result(SECONDS)
    with pytest.raises(tinker.NotFoundError, match="does not exist"):
        rest.delete_checkpoint_from_tinker_path(saved).result(SECONDS)


@pytest.mark.parametrize("odd", ["v1#2", "v1?a=b", "v%31", ".v1", "v1.", "v1/ttl", "v[1]", "v*"])
def test_a_name_that_the_sdk_could_not_address_is_refused(rest, kept, odd):
    with pytest.raises(tinker.RequestFailedError, match="cannot be the name of a checkpoint") as caught:
        kept.trainer.save_weights_for_sampler(odd).result(SECONDS)
    assert caught.value.category == tinker.types.RequestErrorCategory.User
    listed = rest.list_checkpoints(kept.trainer.get_info().model_id).result(SECONDS).checkpoints
    assert {each.tinker_path for each in listed} == {kept.saved, kept.exported}


@pytest.mark.parametrize("name", ["lr=1e-4 (final)", "a+b&c;d@e:f,g~h'i!$", "\u6700\u7d42"])
def test_every_other_name_is_addressed_exactly(rest, service, trainer, name):
    run_id = trainer.get_info().model_id
    paths = {each: trainer.save_weights_for_sampler(each).result(SECONDS).path for each in (name, name + "2")}
    assert service.create_sampling_client(model_path=paths[name]).result(SECONDS) is not None
    rest.publish_checkpoint_from_tinker_path(paths[name]).result(SECONDS)
    rest.set_checkpoint_ttl_from_tinker_path(paths[name], 3600).result(SECONDS)
    told = {each.tinker_path: each for each in rest.list_checkpoints(run_id).result(SECONDS).checkpoints}
    assert {path for path, each in told.items() if each.public and each.expires_at} == {paths[name]}
    rest.unpublish_checkpoint_from_tinker_path(paths[name]).result(SECONDS)
    rest.delete_checkpoint_from_tinker_path(paths[name]).result(SECONDS)
    left = rest.list_checkpoints(run_id).result(SECONDS).checkpoints
    assert [each.tinker_path for each in left] == [paths[name + "2"]]


def test_a_name_of_a_sampler_is_freed_by_deleting_it(rest, trainer, plain_export):
    with pytest.raises(tinker.RequestFailedError, match="delete that one first") as caught:
        trainer.save_weights_for_sampler("v1").result(SECONDS)
    assert "overwrite" not in str(caught.value)
    rest.delete_checkpoint_from_tinker_path(plain_export).result(SECONDS)
    assert trainer.save_weights_for_sampler("v1").result(SECONDS).path == plain_export


def test_an_open_sampler_outlives_its_checkpoint(service, rest, exported):
    sampler = service.create_sampling_client(model_path=exported).result(SECONDS)
    expected = sample(sampler, PROMPT, greedy()).tokens
    rest.delete_checkpoint_from_tinker_path(exported).result(SECONDS)
    assert sample(sampler, PROMPT, greedy()).tokens == expected


def test_a_truncated_checkpoint_is_the_users_error_and_nothing_else_ends(
    server, service, trainer, plain_state
):
    folder = folder_of(server, plain_state)
    largest = max(
        (path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    largest.write_bytes(largest.read_bytes()[:-1])
    with pytest.raises(tinker.BadRequestError, match=f"{largest.name} has .* bytes instead of"):
        service.create_training_client_from_state(plain_state).result(SECONDS)
    with (
        pytest.warns(FutureWarning, match="deprecated"),
        pytest.raises(tinker.RequestFailedError, match="damaged") as caught,
    ):
        trainer.load_state(plain_state).result(SECONDS)
    assert caught.value.category == tinker.types.RequestErrorCategory.User
    train(trainer, batch(seed=2))


def test_a_truncated_sampler_checkpoint_is_the_users_error(server, service, plain_export):
    file = folder_of(server, plain_export) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(tinker.BadRequestError, match=r"adapter_model\.safetensors has 100 bytes instead of"):
        service.create_sampling_client(model_path=plain_export).result(SECONDS)


def test_a_checkpoint_of_another_base_model_is_refused(server, service, plain_state):
    manifest = folder_of(server, plain_state) / MANIFEST
    described = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(described | {"base_model": "Qwen/Qwen3-8B"}))
    message = "was trained on 'Qwen/Qwen3-8B', and this server serves 'tiny'"
    with pytest.raises(tinker.BadRequestError, match=message):
        service.create_training_client_from_state(plain_state).result(SECONDS)


def test_a_checkpoint_whose_folder_was_removed_is_refused(server, service, plain_state):
    shutil.rmtree(folder_of(server, plain_state))
    with pytest.raises(tinker.BadRequestError, match="incomplete"):
        service.create_training_client_from_state(plain_state).result(SECONDS)


@pytest.mark.parametrize("kind", ["weights", "sampler_weights"])
def test_each_kind_of_checkpoint_has_its_use(service, kept, kind):
    if kind == "weights":
        with pytest.raises(tinker.BadRequestError, match="save_weights_for_sampler"):
            service.create_sampling_client(model_path=kept.saved).result(SECONDS)
    else:
        with pytest.raises(tinker.BadRequestError, match="save_state"):
            service.create_training_client_from_state(kept.exported).result(SECONDS)


def test_every_named_version_stays_itself(service, trainer):
    """Also those that had to leave the device for later ones."""
    paths, expected = [], []
    for seed in range(10):
        train(trainer, batch(seed))
        paths.append(trainer.save_weights_for_sampler(f"v{seed}").result(SECONDS).path)
        expected.append(logprobs_of(trainer, QUESTION[:1]))
    tokens = [*QUESTION[0].model_input.to_ints(), QUESTION[0].loss_fn_inputs["target_tokens"].tolist()[-1]]
    for path, logprobs in zip(paths, expected, strict=True):
        sampler = service.create_sampling_client(model_path=path).result(SECONDS)
        _, *scored = sampler.compute_logprobs(prompt(tokens)).result(SECONDS)
        np.testing.assert_allclose(scored, logprobs, atol=1e-4)
