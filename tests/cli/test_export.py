"""``spmd-tx export`` takes what a server has saved, of each kind, and puts the result where it is told."""

import errno
import hashlib
import json
import shutil
from contextlib import nullcontext
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from spmd_tx.cli.main import app
from spmd_tx.coordinator.checkpoints import files
from spmd_tx.coordinator.checkpoints.files import Manifest
from spmd_tx.coordinator.checkpoints.remote_files import RemoteFiles
from spmd_tx.coordinator.checkpoints.remote_store import CheckpointCache, RemoteStore
from spmd_tx.coordinator.wire.checkpoint_paths import CheckpointPath
from spmd_tx.errors import StartError
from spmd_tx.models.adapter_formats import peft
from spmd_tx.models.config import read_model_config
from spmd_tx.protocol.commands import AdapterSpec
from spmd_tx.worker.storage.checkpoints import SlotState, save_state
from tests.golden import families
from tests.support import model_hub
from tests.support.adapter_folders import write_folder
from tests.support.hub import Hub, serving

RUN = "0a1b:train:0"
ADAPTER = AdapterSpec(rank=6, alpha=12.0, train_unembed=False)


@pytest.fixture(scope="module")
def layout(request):
    """Of factors of experts."""
    return getattr(request, "param", "shared-outer")


@pytest.fixture(scope="module")
def made(tmp_path_factory, layout):
    """A base model, and the folder of an adapter of it."""
    folder = tmp_path_factory.mktemp("made")
    path = families.write(folder / "model", "glm4_moe")
    (path / "tokenizer.json").write_text("{}")
    return path, write_folder(folder / "adapter", ADAPTER, read_model_config(path, layout), str(path))


def manifest(path, layout, sizes, run):
    return Manifest(
        run_id=run,
        base_model=str(path),
        rank=ADAPTER.rank,
        alpha=ADAPTER.alpha,
        train_attn=True,
        train_mlp=True,
        train_unembed=False,
        created_at=1.0,
        expires_at=None,
        user_metadata=None,
        files=sizes,
        expert_lora=layout,
    )


def staged(folder, made, layout, kind, run=RUN):
    """The files of a checkpoint of this kind, as workers write them."""
    path, adapter = made
    model = read_model_config(path, layout)
    if kind == "weights":
        factors = peft.read(adapter, ADAPTER, model, ADAPTER.rank)
        save_state(folder, SlotState[Any](factors, factors, factors, jnp.int32(3)), ADAPTER.rank)
    else:
        write_folder(folder, ADAPTER, model, str(path))
    return manifest(path, layout, files.sizes(folder), run)


def save(data_dir, made, layout, kind, run=RUN, **changes):
    place = CheckpointPath(run, kind, "final")
    folder = place.folder(data_dir / "checkpoints")
    prepared = files.prepare(folder)
    files.publish(prepared, folder, staged(prepared, made, layout, kind, run), nullcontext())
    if changes:
        files.change_manifest(folder, **changes)
    return str(place), folder


def export(*arguments, **options):
    given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    return CliRunner().invoke(app, ["export", *map(str, arguments), *given], catch_exceptions=False)


def content(folder):
    return {each.name: each.read_bytes() for each in folder.iterdir()}


@pytest.mark.parametrize(
    "kind, layout",
    [
        ("weights", "shared-outer"),
        ("weights", "per-expert"),
        ("sampler_weights", "shared-outer"),
        ("external_weights", "per-expert"),
    ],
    indirect=["layout"],
)
def test_of_every_kind_by_its_path_or_its_folder(tmp_path, made, layout, kind):
    path, folder = save(tmp_path, made, layout, kind)
    assert export(made[1], format="tinker", out=tmp_path / "expected").exit_code == 0
    assert export(path, format="tinker", out=tmp_path / "named", data_dir=tmp_path).exit_code == 0
    assert export(folder, format="tinker", out=tmp_path / "folder").exit_code == 0
    assert content(tmp_path / "named") == content(tmp_path / "expected") == content(tmp_path / "folder")


def test_from_a_store_and_to_one(tmp_path, made, layout):
    path = CheckpointPath(RUN, "weights", "final")
    store = RemoteStore(RemoteFiles(f"file://{tmp_path}/store"), CheckpointCache(tmp_path / "cache", 1 << 40))
    prepared = store.stage(path)
    store.commit(path, prepared, staged(prepared, made, layout, "weights"))
    base, out = f"file://{tmp_path}/store", f"file://{tmp_path}/out"
    assert export(path, out=out, checkpoints_base=base, data_dir=tmp_path / "none").exit_code == 0
    assert export(made[1], out=tmp_path / "expected").exit_code == 0
    assert content(tmp_path / "out") == content(tmp_path / "expected")
    with pytest.raises(StartError, match="holds a model or an adapter already"):
        export(made[1], out=out)


def test_an_upload_that_was_interrupted_goes_on(tmp_path, made, layout, monkeypatch):
    """Files that have arrived are not sent again; those of another export are."""
    out, sent, upload, limits = f"file://{tmp_path}/out", list[str](), RemoteFiles.upload, [0]

    def send(remote, source, name):
        if len(sent) == limits[0]:
            raise OSError("the network is gone")
        sent.append(name)
        upload(remote, source, name)

    monkeypatch.setattr(RemoteFiles, "upload", send)
    assert export(made[1], out=tmp_path / "expected").exit_code == 0
    names = sorted(content(tmp_path / "expected"), key=lambda name: (name == "config.json", name))
    for limits[0] in range(1, len(names)):
        with pytest.raises(StartError, match=r"cannot write to --out .*the network is gone"):
            export(made[1], out=out)
        assert not (tmp_path / "out/config.json").exists()
    (tmp_path / "out" / names[0]).write_bytes(b"half")
    limits[0] = len(names) + 1
    assert export(made[1], out=out).exit_code == 0
    assert sent == [*names[:-1], names[0], names[-1]]
    assert content(tmp_path / "out") == content(tmp_path / "expected")


def test_an_upload_over_one_that_was_interrupted_is_its_own(tmp_path, made, layout, monkeypatch):
    out, upload = f"file://{tmp_path}/out", RemoteFiles.upload

    def fail_at_the_end(remote, source, name):
        if name == "config.json":
            raise OSError("the network is gone")
        upload(remote, source, name)

    with monkeypatch.context() as patch:
        patch.setattr(RemoteFiles, "upload", fail_at_the_end)
        with pytest.raises(StartError, match="the network is gone"):
            export(made[1], out=out)
    assert export(made[1], format="peft", out=out).exit_code == 0
    assert export(made[1], format="peft", out=tmp_path / "expected").exit_code == 0
    assert content(tmp_path / "out") == content(tmp_path / "expected")


@pytest.mark.parametrize(
    "changes, name, message",
    [
        ({"files": {"adapter_config.json.age": 3}}, "final", "are encrypted .*age --decrypt"),
        ({"digests": {"adapter_config.json": "0"}}, "final", "is damaged: .*another content"),
        ({}, "other", "there is no checkpoint tinker.*other in .*name the server's --data-dir"),
        ({}, "a/b", "is not a checkpoint path"),
    ],
    ids=["encrypted", "damaged", "absent", "no-path"],
)
def test_what_cannot_be_exported_is_refused(tmp_path, made, layout, changes, name, message):
    path, folder = save(tmp_path, made, layout, "sampler_weights", **changes)
    source = folder if "files" in changes else path.replace("final", name)
    with pytest.raises(StartError, match=message):
        export(source, out=tmp_path / "out", data_dir=tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_run_is_named_by_its_id_and_not_by_its_folder(tmp_path, made, layout):
    path, _ = save(tmp_path, made, layout, "sampler_weights")
    with pytest.raises(StartError, match="there is no checkpoint tinker://0a1b_train_0/"):
        export(path.replace(RUN, "0a1b_train_0"), out=tmp_path / "out", data_dir=tmp_path)


def in_a_store(tmp_path, made, layout, run):
    path = CheckpointPath(run, "sampler_weights", "final")
    store = RemoteStore(RemoteFiles(f"file://{tmp_path}/store"), CheckpointCache(tmp_path / "cache", 1 << 40))
    prepared = store.stage(path)
    store.commit(path, prepared, staged(prepared, made, layout, "sampler_weights", run))
    return {"checkpoints_base": f"file://{tmp_path}/store"}


def in_a_folder(tmp_path, made, layout, run):
    save(tmp_path, made, layout, "sampler_weights", run=run)
    return {"data_dir": tmp_path}


@pytest.mark.parametrize("keep", [in_a_folder, in_a_store])
def test_the_beginning_of_a_runs_id_will_do_where_one_run_alone_is_meant(tmp_path, made, layout, keep):
    for run in (RUN, "0a1c:train:0"):
        options = keep(tmp_path, made, layout, run)

    def exported(beginning, kind="sampler_weights"):
        out = tmp_path / f"out-{beginning}"
        export(f"tinker://{beginning}/{kind}/final", format="peft", out=out, **options)
        return content(out)

    expected = exported(RUN)
    assert exported("0a1b") == exported("0a1b:tr") == expected
    with pytest.raises(StartError, match=r"0a1b:train:0/.* and .*0a1c:train:0/.* are both meant by .*//0a1/"):
        exported("0a1")
    for beginning, kind in (("0a1d", "sampler_weights"), ("0a1b_", "sampler_weights"), ("0a", "weights")):
        with pytest.raises(StartError, match="there is no checkpoint"):
            exported(beginning, kind)


def test_a_training_checkpoint_of_another_model_is_refused(tmp_path, made, layout):
    path, _ = save(tmp_path, made, layout, "weights")
    other = families.write(tmp_path / "other", "llama")
    with pytest.raises(StartError, match="is not a training checkpoint of this base model"):
        export(path, format="peft", out=tmp_path / "out", data_dir=tmp_path, base_model=other)


def test_a_folder_without_an_adapter_is_refused(tmp_path):
    with pytest.raises(StartError, match=r"has no adapter_config.json; name the folder of an adapter"):
        export(tmp_path / "nowhere", out=tmp_path / "out")


def damaged(tmp_path, made, change_tensors=lambda tensors: tensors, **values):
    folder = shutil.copytree(made[1], tmp_path / "damaged")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | values))
    tensors = load_file(folder / "adapter_model.safetensors")
    save_file(change_tensors(tensors), folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize(
    "values, message",
    [
        ({"r": "6"}, r"Expected `int`, got `str` - at `\$.r`"),
        ({"r": 0}, "r is 0; it must be positive"),
        ({"lora_alpha": float("nan")}, "adapter_config.json cannot be read, or is damaged"),
        ({"base_model_name_or_path": 5}, "Expected `str | null`, got `int`"),
        ({"base_model_name_or_path": None}, "names no base model; name it with --base-model"),
        ({"peft_type": "IA3"}, "peft_type of .* is 'IA3', with which"),
        ({"bias": "all"}, "bias of .* is 'all'"),
    ],
    ids=str,
)
def test_a_damaged_configuration_is_refused(tmp_path, made, values, message):
    with pytest.raises(StartError, match=message):
        export(damaged(tmp_path, made, **values), out=tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda each: np.full_like(each, np.nan),
            "holds values that are not finite; save the adapter again, or export",
        ),
        (lambda each: each.astype(np.int8), "has the type I8; it must be one of F64, F32, BF16, F16"),
        (None, "has factors twice, under names that mean the same"),
    ],
    ids=["nan", "int8", "twice"],
)
def test_damaged_factors_are_refused(tmp_path, made, change, message):
    def changed(tensors):
        name = min(tensors)
        if change is None:
            return tensors | {name.removeprefix("base_model.model."): tensors[name]}
        return tensors | {name: change(tensors[name])}

    with pytest.raises(StartError, match=message):
        export(damaged(tmp_path, made, changed), out=tmp_path / "out", format="peft")
    assert not (tmp_path / "out").exists()


def test_a_damaged_training_checkpoint_is_found_in_its_folder_too(tmp_path, made, layout):
    _, folder = save(tmp_path, made, layout, "weights")
    (folder / "_METADATA").write_text("[]")
    with pytest.raises(StartError, match=r"is damaged: .*_METADATA has 2 bytes instead of"):
        export(folder, out=tmp_path / "out")


def test_a_place_that_cannot_be_written_is_told_before_anything_is_read(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for place, message in (
        ("file/out", "file is not a folder that can be written; name another folder"),
        ("link", "link exists already"),
    ):
        with pytest.raises(StartError, match=message):
            export(tmp_path / "nowhere", out=tmp_path / place)


def test_a_full_disk_is_told_with_the_place(tmp_path, made, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("spmd_tx.exports.adapter_formats.write_tensors", full)
    with pytest.raises(StartError, match=r"cannot write .*out: .*No space left.*make room and run"):
        export(made[1], out=tmp_path / "out", format="peft")


def test_a_place_has_to_be_named(made):
    with pytest.raises(StartError, match="--out, --push-to-hub, or both"):
        export(made[1])


# huggingface_hub's own
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.mark.parametrize("form", ["merged", "tinker"])
def test_the_base_may_be_a_revision_of_the_hub(tmp_path, made, layout, monkeypatch, form):
    _, folder = save(tmp_path, made, layout, "weights")
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / "config.json").write_text("{}")
    assert export(made[1], format=form, out=tmp_path / "expected").exit_code == 0
    with model_hub.serving(model_hub.ModelHub()) as hub:
        model_hub.lead_to(hub, monkeypatch, tmp_path / "cache")
        hub.push("owner/base", made[0], "v1")
        hub.push("owner/base", tmp_path / "newer")
        base = {"base_model": "owner/base", "revision": "v1"}
        for source, out in ((made[1], "adapter"), (folder, "checkpoint")):
            assert export(source, format=form, out=tmp_path / out, **base).exit_code == 0
            weights = next(name for name in content(tmp_path / out) if name.endswith(".safetensors"))
            assert content(tmp_path / out)[weights] == content(tmp_path / "expected")[weights]


@pytest.fixture
def hub(monkeypatch):
    hub = Hub("hf_secret")
    with serving(hub):
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the stand-in stores by Git LFS
        monkeypatch.setenv("HF_TOKEN", hub.token)
        yield hub


def test_pushed_to_the_hub(tmp_path, made, hub):
    assert export(made[1], "--private", format="peft", push_to_hub="alice/adapter").exit_code == 0
    assert export(made[1], format="peft", out=tmp_path / "expected").exit_code == 0
    assert hub.files == {"alice/adapter": content(tmp_path / "expected")}
    assert hub.private == {"alice/adapter": True}
    (large,) = hub.objects
    assert large == hashlib.sha256(hub.objects[large]).hexdigest()


def test_a_merged_model_is_pushed_and_stays_in_its_folder(tmp_path, made, hub):
    assert export(made[1], out=tmp_path / "merged", push_to_hub="alice/model").exit_code == 0
    assert hub.files["alice/model"] == content(tmp_path / "merged")


def test_files_that_have_arrived_on_the_hub_are_not_sent_again(made, hub):
    hub.room = 1
    with pytest.raises(StartError, match=r"cannot push to alice/model: .*403"):
        export(made[1], push_to_hub="alice/model")
    arrived = [*hub.sent]
    assert hub.files == {"alice/model": {}}
    hub.room = 2
    assert export(made[1], push_to_hub="alice/model").exit_code == 0
    assert hub.files["alice/model"].keys() >= {"model.safetensors", "tokenizer.json", "config.json"}
    assert len(arrived) == 1
    assert sorted(hub.sent) == sorted(hub.objects)  # each once


def test_what_the_hub_refuses_is_told_before_the_export_or_leaves_its_folder(
    tmp_path, made, hub, monkeypatch
):
    hub.refuses_commits = True
    with pytest.raises(StartError, match=r"cannot push to alice/model: .*403"):
        export(made[1], format="peft", out=tmp_path / "kept", push_to_hub="alice/model")
    assert (tmp_path / "kept/adapter_config.json").exists()
    with pytest.raises(StartError, match=r"--push-to-hub is 'a/b/c': .*; name it as OWNER/NAME"):
        export(made[1], format="peft", push_to_hub="a/b/c")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(StartError, match=r"cannot push to alice/model: .*; set HF_TOKEN"):
        export(made[1], format="peft", out=tmp_path / "out", push_to_hub="alice/model")
    assert not (tmp_path / "out").exists()
