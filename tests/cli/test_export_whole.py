"""``spmd-tx export`` takes models all of whose weights were trained, and puts them where it is told."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from spmd_tx.cli.main import app
from spmd_tx.coordinator.checkpoints import files
from spmd_tx.coordinator.checkpoints.files import Manifest
from spmd_tx.coordinator.wire.checkpoint_paths import CheckpointPath
from spmd_tx.errors import StartError
from spmd_tx.exports.merged import export_whole
from spmd_tx.models.base_weights import weights
from spmd_tx.models.config import read_model_config
from spmd_tx.sharding.mesh import make_mesh
from spmd_tx.worker.storage.checkpoints import SlotState, save_state
from spmd_tx.worker.storage.full_weights import write_model
from tests.golden import families
from tests.support.tiny_engine import random_arrays

RUN = "0a1b:train:0"


@pytest.fixture(scope="module", params=["llama", "qwen3_5"])
def base(request, tmp_path_factory):
    """A base model in bfloat16; that of Qwen3.5 has tensors that are several maps."""
    folder = tmp_path_factory.mktemp("made")
    path = families.write(folder / "float32", request.param)
    (path / "tokenizer.json").write_text("{}")
    export_whole(path, folder / "model", "bfloat16", {})
    return folder / "model"


def save(data_dir, base, kind, seed=1):
    """Save what a server that trains all weights saves; return its path."""
    model, mesh = read_model_config(base), make_mesh(1, 1, 1)
    place = CheckpointPath(RUN, kind, "final")
    folder = place.folder(data_dir / "checkpoints")
    prepared = files.prepare(folder)
    if kind == "weights":
        w = random_arrays(weights(model, mesh, jnp.float32), seed)
        state = jax.tree.map(jnp.asarray, SlotState(w, w, w, np.int32(3)))
        save_state(prepared, state, None)
    else:
        declared = weights(model, mesh, jnp.bfloat16)
        write_model(prepared, random_arrays(declared, seed), declared, model, base)
    known = Manifest(
        run_id=RUN,
        base_model=str(base),
        rank=0,
        alpha=32.0,
        train_attn=True,
        train_mlp=True,
        train_unembed=True,
        created_at=1.0,
        expires_at=None,
        user_metadata=None,
        files=files.sizes(prepared),
    )
    files.publish(prepared, folder, known, nullcontext())
    return str(place)


def export(source, data_dir, out, **options):
    given = {"data-dir": data_dir, "out": out, **options}
    arguments = ["export", source, *(f"--{name}={value}" for name, value in given.items())]
    return CliRunner().invoke(app, arguments, catch_exceptions=False)


def tensors(folder):
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("kind", ["sampler_weights", "weights"])
def test_a_whole_model_leaves_as_one(tmp_path, base, kind):
    path = save(tmp_path, base, kind)
    assert export(path, tmp_path, tmp_path / "out").exit_code == 0
    assert export(path, tmp_path, tmp_path / "wide", dtype="float32").exit_code == 0
    model, mesh = read_model_config(base), make_mesh(1, 1, 1)
    declared = weights(model, mesh, jnp.float32 if kind == "weights" else jnp.bfloat16)
    write_model(tmp_path / "expected", random_arrays(declared, 1), declared, model, base)
    expected, found = tensors(tmp_path / "expected"), tensors(tmp_path / "out")
    assert found.keys() == expected.keys() == tensors(base).keys()
    exact = {name for name, each in found.items() if each.dtype != jnp.bfloat16}  # constants of linear layers
    assert all("linear_attn" in name for name in exact)
    for name, wide in tensors(tmp_path / "wide").items():
        assert wide.dtype == np.float32
        np.testing.assert_array_equal(found[name].astype(np.float32), wide.astype(found[name].dtype))
        np.testing.assert_array_equal(wide, expected[name].astype(found[name].dtype).astype(np.float32))
    assert read_model_config(tmp_path / "out") == model
    names = {each.name for each in (tmp_path / "out").iterdir()}
    assert "tokenizer.json" in names
    assert not names & {"checkpoint.json", "export.json"}


@pytest.mark.parametrize("kind", ["sampler_weights", "weights"])
def test_a_whole_model_is_no_adapter(tmp_path, base, kind):
    path = save(tmp_path, base, kind)
    with pytest.raises(StartError, match=r"is a complete model, and --format peft is for adapters"):
        export(path, tmp_path, tmp_path / "out", format="peft")
    assert not (tmp_path / "out").exists()


def test_a_training_checkpoint_of_another_model_is_refused(tmp_path, base):
    path = save(tmp_path, base, "weights")
    other = families.write(tmp_path / "other", "llama", hidden_size=96)
    (other / "tokenizer.json").write_text("{}")
    with pytest.raises(StartError, match=r"is not a training checkpoint of this base model"):
        export(path, tmp_path, tmp_path / "out", **{"base-model": other})


def test_an_export_goes_on_where_it_was_and_not_with_another_model(tmp_path, base):
    path = save(tmp_path, base, "sampler_weights")
    staged = tmp_path / "out.partial"
    staged.mkdir()
    (staged / "export.json").write_text("{}")
    with pytest.raises(StartError, match="holds the begin of another export"):
        export(path, tmp_path, tmp_path / "out")
