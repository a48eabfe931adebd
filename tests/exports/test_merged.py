"""Merged checkpoints hold W + scale · B A, wherever a family has its matrices and however it encodes them."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from spmd_tx.cli.main import app
from spmd_tx.demo.tiny_families import stored_shapes
from spmd_tx.errors import StartError
from spmd_tx.exports import tensors as exported
from spmd_tx.exports.merged import export_merged
from spmd_tx.models.adapter_formats import peft
from spmd_tx.models.base_weights import weights
from spmd_tx.models.checkpoint import huggingface
from spmd_tx.models.checkpoint.files import INDEX_FILE, SINGLE_FILE
from spmd_tx.models.config import read_model_config
from spmd_tx.protocol.commands import AdapterSpec
from spmd_tx.sharding.mesh import make_mesh
from tests.golden import families, vision_cases
from tests.support import encoded_models
from tests.support.adapter_folders import write_folder

ADAPTER = AdapterSpec(rank=6, alpha=12.0)
# Of the largest number that shares a scale: half the widest step between two numbers, and a bit.
ROUNDED = {"mxfp4": 1 / 4, "fp8": 1 / 16, "int4": 1 / 13}


def loaded(path):
    """The arrays of a checkpoint as the server computes with them, by name."""
    model, mesh = read_model_config(path), make_mesh(1, 1, 1)
    declared = weights(model, mesh, jnp.float32)
    arrays = huggingface.load(path, declared, mesh, lambda _: None, model.unread)
    return model, jax.tree.map(np.asarray, arrays)


def expected(path, adapter, folder):
    """The base model's arrays with what the adapter adds, from its declaration alone, and its embedding."""
    model, base = loaded(path)
    factors = peft.read(folder, adapter, model, adapter.rank)
    layers = {name: base.layers[name] for name in base.layers}
    for name, its in factors.layers.items():
        scale = adapter.alpha / model.adapted[name].rank(adapter.rank)
        a, b = ((f[:, None] if f.ndim < layers[name].ndim else f) for f in (its.a, its.b))
        layers[name] = layers[name] + np.float32(scale) * (a.swapaxes(-1, -2) @ b)
    head = base.unembed + np.float32(adapter.scale) * (factors.head.b.T @ factors.head.a)
    return layers, head, base.embed


def check(path, folder, merged, adapter, tolerance):
    layers, head, embed = expected(path, adapter, folder)
    _, found = loaded(merged)
    for name, array in layers.items():
        atol = tolerance(name, array)
        np.testing.assert_allclose(found.layers[name], array, rtol=0, atol=atol, err_msg=name)
    np.testing.assert_allclose(found.unembed, head, rtol=0, atol=tolerance("head", head))
    np.testing.assert_allclose(found.embed, embed, rtol=0, atol=tolerance("embed", embed))


@pytest.mark.parametrize("family", families.CONFIGS)
def test_of_every_family(tmp_path, family):
    path = families.write(tmp_path / "model", family)
    folder = write_folder(tmp_path / "adapter", ADAPTER, read_model_config(path), "tiny")
    export_merged(folder, path, tmp_path / "merged", None)
    check(path, folder, tmp_path / "merged", ADAPTER, lambda name, array: 1e-6)
    was, now = (json.loads((folder / "config.json").read_bytes()) for folder in (path, tmp_path / "merged"))
    assert now == was | {"tie_word_embeddings": False}


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_vl_moe"])
def test_the_vision_tower_is_copied_byte_for_byte(tmp_path, name):
    path = vision_cases.write(tmp_path / "model", name)
    folder = write_folder(tmp_path / "adapter", ADAPTER, read_model_config(path), "tiny")
    export_merged(folder, path, tmp_path / "merged", None)
    check(path, folder, tmp_path / "merged", ADAPTER, lambda name, array: 1e-6)
    was, now = load_file(path / SINGLE_FILE), load_file(tmp_path / "merged" / SINGLE_FILE)
    of_tower = {tensor for tensor in was if tensor.startswith("model.visual.")}
    assert len(of_tower) > 3 * 12
    assert of_tower == {tensor for tensor in now if tensor.startswith("model.visual.")}
    assert all(was[tensor].tobytes() == now[tensor].tobytes() for tensor in of_tower)


def test_experts_with_factors_of_their_own(tmp_path):
    path = families.write(tmp_path / "model", "glm4_moe")
    model = read_model_config(path, "per-expert")
    folder = write_folder(tmp_path / "adapter", ADAPTER, model, "tiny")
    export_merged(folder, path, tmp_path / "merged", None)
    merged = load_file(tmp_path / "merged" / SINGLE_FILE)
    base, factors = load_file(path / SINGLE_FILE), load_file(folder / "adapter_model.safetensors")
    name = "model.layers.1.mlp.experts.3.down_proj"
    a, b = (factors[f"base_model.model.{name}.lora_{factor}.weight"] for factor in "AB")
    scale = ADAPTER.alpha / len(a)
    assert len(a) < ADAPTER.rank
    np.testing.assert_allclose(merged[f"{name}.weight"], base[f"{name}.weight"] + scale * b @ a, atol=1e-6)


def test_a_tied_head_becomes_one_of_its_own(tmp_path):
    path = families.write(tmp_path / "model", "llama", tie_word_embeddings=True)
    folder = write_folder(tmp_path / "adapter", ADAPTER, read_model_config(path), "tiny")
    export_merged(folder, path, tmp_path / "merged", None)
    check(path, folder, tmp_path / "merged", ADAPTER, lambda name, array: 1e-6)
    assert json.loads((tmp_path / "merged/config.json").read_bytes())["tie_word_embeddings"] is False


@pytest.mark.parametrize("is_split", [False, True])
def test_a_tied_head_that_is_stored_all_the_same_is_written_once(tmp_path, is_split):
    path = families.write(tmp_path / "model", "llama", tie_word_embeddings=True)
    tensors = load_file(path / SINGLE_FILE)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, path / SINGLE_FILE, metadata={"format": "pt"})
    if is_split:
        split(path)
    folder = write_folder(tmp_path / "adapter", ADAPTER, read_model_config(path), "tiny")
    export_merged(folder, path, tmp_path / "merged", None)
    check(path, folder, tmp_path / "merged", ADAPTER, lambda name, array: 1e-6)
    files = [load_file(each) for each in (tmp_path / "merged").glob("*.safetensors")]
    assert sum("lm_head.weight" in each for each in files) == 1


def test_without_a_trained_head_tied_embeddings_stay_tied(tmp_path):
    path = families.write(tmp_path / "model", "llama", tie_word_embeddings=True)
    adapter = AdapterSpec(rank=2, train_unembed=False)
    folder = write_folder(tmp_path / "adapter", adapter, read_model_config(path), "tiny")
    export_merged(folder, path, tmp_path / "merged", None)
    assert "lm_head.weight" not in load_file(tmp_path / "merged" / SINGLE_FILE)
    assert json.loads((tmp_path / "merged/config.json").read_bytes())["tie_word_embeddings"] is True


@pytest.mark.parametrize("encoding", encoded_models.MODELS)
def test_encoded_experts_are_encoded_again(tmp_path, encoding):
    path = encoded_models.write(tmp_path / "model", encoding)
    folder = write_folder(tmp_path / "adapter", ADAPTER, read_model_config(path), "tiny")
    export_merged(folder, path, tmp_path / "merged", None)

    def tolerance(name, array):
        is_encoded = name.rpartition(".")[2] in {"gate", "up", "down"} and array.ndim == 4
        return ROUNDED[encoding] * np.abs(array).max() if is_encoded or encoding == "fp8" else 1e-6

    check(path, folder, tmp_path / "merged", ADAPTER, tolerance)
    config = json.loads((tmp_path / "merged/config.json").read_bytes())
    assert config["quantization_config"] == encoded_models.MODELS[encoding]["quantization_config"]


def test_the_shapes_beside_packed_integers_are_copied(tmp_path):
    path = encoded_models.write(tmp_path / "model", "int4")
    tensors = load_file(path / SINGLE_FILE)
    shapes = {
        name.replace("_packed", "_shape"): np.array([len(packed), 8 * packed.shape[-1]], np.int32)
        for name, packed in tensors.items()
        if name.endswith("_packed")
    }
    save_file(tensors | shapes, path / SINGLE_FILE)
    folder = write_folder(tmp_path / "adapter", ADAPTER, read_model_config(path), "tiny")
    export_merged(folder, path, tmp_path / "merged", None)
    merged = load_file(tmp_path / "merged" / SINGLE_FILE)
    assert shapes
    for name, shape in shapes.items():
        np.testing.assert_array_equal(merged[name], shape)


def test_encoded_matrices_are_computed_once(tmp_path, monkeypatch):
    path = encoded_models.write(tmp_path / "model", "mxfp4")
    folder = write_folder(tmp_path / "adapter", ADAPTER, read_model_config(path), "tiny")
    encoded, encode = [], exported.encode
    monkeypatch.setattr(exported, "encode", lambda *given: encoded.append(given) or encode(*given))
    export_merged(folder, path, tmp_path / "merged", None)
    changed = [name for name in load_file(path / SINGLE_FILE) if name.endswith("_scales")]
    assert len(encoded) == len(changed) * families.CONFIGS["gpt_oss"]["num_local_experts"]


@pytest.mark.parametrize("encoding", encoded_models.MODELS)
def test_or_decoded_on_request(tmp_path, encoding):
    path = encoded_models.write(tmp_path / "model", encoding)
    folder = write_folder(tmp_path / "adapter", ADAPTER, read_model_config(path), "tiny")
    export_merged(folder, path, tmp_path / "merged", "float32")
    config = json.loads((tmp_path / "merged/config.json").read_bytes())
    assert "quantization_config" not in config
    if encoding != "mxfp4":  # decoded gpt-oss has its experts the other way round
        check(path, folder, tmp_path / "merged", ADAPTER, lambda name, array: 1e-5)


def test_in_several_files_and_another_type(tmp_path):
    path = families.write(tmp_path / "model", "qwen2")
    (path / "tokenizer.json").write_text("{}")
    (path / "modeling_evil.py").write_text("raise SystemExit")
    split(path)
    folder = write_folder(tmp_path / "adapter", ADAPTER, read_model_config(path), str(path))
    arguments = ["export", str(folder), "--out", str(tmp_path / "merged"), "--dtype", "bfloat16"]
    assert CliRunner().invoke(app, arguments, catch_exceptions=False).exit_code == 0
    check(path, folder, tmp_path / "merged", ADAPTER, lambda name, array: np.abs(array).max() / 256)
    names = {each.name for each in (tmp_path / "merged").iterdir()}
    assert names == {"a.safetensors", "b.safetensors", INDEX_FILE, "config.json", "tokenizer.json"}
    index = json.loads((tmp_path / "merged" / INDEX_FILE).read_bytes())
    files = {each: (tmp_path / "merged" / each).stat().st_size for each in set(index["weight_map"].values())}
    assert (
        index["metadata"]["total_size"] < sum(files.values()) < 1.1 * index["metadata"]["total_size"] + 8192
    )


def split(path):
    tensors = load_file(path / SINGLE_FILE)
    parts = dict(list(tensors.items())[::2]), dict(list(tensors.items())[1::2])
    for name, part in zip("ab", parts, strict=True):
        save_file(part, path / f"{name}.safetensors", metadata={"format": "pt"})
    weight_map = {
        each: f"{name}.safetensors" for name, part in zip("ab", parts, strict=True) for each in part
    }
    (path / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / SINGLE_FILE).unlink()


def test_an_adapter_of_another_model_is_refused(tmp_path):
    path = families.write(tmp_path / "model", "llama")
    other = families.write(tmp_path / "other", "llama", hidden_size=64)
    folder = write_folder(tmp_path / "adapter", ADAPTER, read_model_config(other), "tiny")
    with pytest.raises(StartError, match=r"has the shape \[6, 64\]; it must be \[6, 32\] .*32 channels"):
        export_merged(folder, path, tmp_path / "merged", None)
    mixture = families.write(tmp_path / "mixture", "glm4_moe")
    folder = write_folder(tmp_path / "foreign", ADAPTER, read_model_config(mixture), "tiny")
    with pytest.raises(StartError, match="has no such map"):
        export_merged(folder, path, tmp_path / "merged", None)
    assert not (tmp_path / "merged").exists()


def test_the_scale_is_that_of_the_adapters_kind(tmp_path):
    path = families.write(tmp_path / "model", "llama")
    folder = write_folder(tmp_path / "adapter", ADAPTER, read_model_config(path), "tiny")
    config = json.loads((folder / "adapter_config.json").read_bytes())
    for change, result in (
        ({"lora_alpha": 5.0, "use_rslora": True}, "same"),
        ({"use_dora": True}, "refused"),
    ):
        (folder / "adapter_config.json").write_text(json.dumps(config | change))
        if result == "refused":
            with pytest.raises(StartError, match=r"use_dora of .* is True, .*; merge such an adapter"):
                export_merged(folder, path, tmp_path / "refused", None)
            continue
        export_merged(folder, path, tmp_path / "merged", None)
        adapter = AdapterSpec(rank=ADAPTER.rank, alpha=5.0 * math.sqrt(ADAPTER.rank))
        check(path, folder, tmp_path / "merged", adapter, lambda name, array: 1e-6)


def test_a_place_that_is_taken_is_left_alone(tmp_path):
    path = families.write(tmp_path / "model", "llama")
    folder = write_folder(tmp_path / "adapter", ADAPTER, read_model_config(path), "tiny")
    with pytest.raises(StartError, match="exists already"):
        export_merged(folder, path, path, None)


KILLED = """
import os, signal, sys
from pathlib import Path
from spmd_tx.exports import checkpoint
from spmd_tx.exports.merged import export_merged
written = []
def kill(done, total):
    if done > 0.6 * total:
        os.kill(os.getpid(), signal.SIGKILL)
export_merged(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), None, kill)
"""


def test_an_export_that_was_killed_is_not_there_and_goes_on(tmp_path):
    path = families.write(tmp_path / "model", "qwen2")
    split(path)
    folder = write_folder(tmp_path / "adapter", ADAPTER, read_model_config(path), "tiny")
    merged = tmp_path / "merged"
    killed = subprocess.run([sys.executable, "-c", KILLED, folder, path, merged], env=os.environ, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not merged.exists()
    staged = tmp_path / "merged.partial"
    first = (staged / "a.safetensors").stat()
    other = write_folder(tmp_path / "other", AdapterSpec(rank=2), read_model_config(path), "tiny")
    with pytest.raises(StartError, match="begin of another export"):
        export_merged(other, path, merged, None)
    export_merged(folder, path, merged, None)
    assert (merged / "a.safetensors").stat().st_ino == first.st_ino
    assert not staged.exists()
    check(path, folder, merged, ADAPTER, lambda name, array: 1e-6)


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path):
    """A model of 2 GB takes less than half of that, beside what is mapped."""
    raw = families.CONFIGS["llama"] | {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
        "intermediate_size": 8192,
        "vocab_size": 32000,
    }
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(raw))
    model, end, header = read_model_config(path), 0, {}
    for name, shape in stored_shapes(model).items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (path / SINGLE_FILE).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)  # zeros
    folder = write_folder(tmp_path / "adapter", AdapterSpec(rank=32), model, "tiny")
    before, most = anonymous_bytes(), 0

    def look(done, total):
        nonlocal most
        most = max(most, anonymous_bytes() - before)

    export_merged(folder, path, tmp_path / "merged", None, look)
    print(f"{most / 1e6:.0f} MB for a model of {end / 1e6:.0f} MB")
    assert end > 2e9 > 1e9 > most


def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (each for each in lines if each.startswith("RssAnon"))
    return 1024 * int(line.split()[1])
