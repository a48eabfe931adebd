import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file

from spmd_tx.demo import tiny_model
from spmd_tx.errors import StartError
from spmd_tx.models.base_weights import weights as declare_weights
from spmd_tx.models.checkpoint import huggingface
from spmd_tx.models.checkpoint.files import Files
from spmd_tx.models.checkpoint.index import INDEX_FILE, read_index
from spmd_tx.models.config import read_model_config
from spmd_tx.models.declared.unread import Unread
from spmd_tx.sharding.mesh import make_mesh
from spmd_tx.sharding.weight import Weight

SPEC = tiny_model.Spec(n_layers=3, d_model=32, n_kv_heads=2, d_ff=48, vocab_size=272, tied=False)
MESHES = [(1, 1, 1), (8, 1, 1), (2, 2, 2), (1, 1, 8), (2, 1, 4)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("model"), SPEC)


def load(path, mesh_shape=(1, 1, 1), dtype=jnp.float32, progress=lambda message: None):
    mesh = make_mesh(*mesh_shape)
    return huggingface.load(path, declare_weights(read_model_config(path), mesh, dtype), mesh, progress)


@pytest.mark.parametrize("mesh_shape", MESHES)
def test_every_weight_is_the_stored_one_in_its_place(checkpoint, mesh_shape):
    placed = load(checkpoint, mesh_shape)
    weights, stored = jax.device_get(placed), load_file(checkpoint / "model.safetensors")

    declared = declare_weights(read_model_config(checkpoint), make_mesh(*mesh_shape), jnp.float32)
    layer = "model.layers.{}.self_attn.o_proj.weight"
    np.testing.assert_array_equal(
        weights.layers.o, np.stack([stored[layer.format(index)].T for index in range(3)])
    )
    np.testing.assert_array_equal(weights.layers.q_norm[2], stored["model.layers.2.self_attn.q_norm.weight"])
    np.testing.assert_array_equal(weights.layers.down[1], stored["model.layers.1.mlp.down_proj.weight"].T)
    np.testing.assert_array_equal(weights.embed, stored["model.embed_tokens.weight"])
    np.testing.assert_array_equal(weights.head, stored["lm_head.weight"])
    np.testing.assert_array_equal(weights.final_norm, stored["model.norm.weight"])
    specs = jax.tree.map(lambda array: array.sharding.spec, placed)
    assert specs == jax.tree.map(lambda weight: weight.spec, declared)


@pytest.mark.parametrize("mesh_shape", [(1, 1, 1), (2, 2, 2), (1, 4, 2)])
@pytest.mark.parametrize("split", [False, True])
def test_experts_are_stacked_in_their_order(tmp_path, mesh_shape, split):
    path = tiny_model.write(tmp_path, dataclasses.replace(SPEC, d_ff=16, n_experts=4, n_shards=2))
    mesh, model = make_mesh(*mesh_shape), read_model_config(path)
    declared = declare_weights(model, mesh, jnp.float32, split_over_fsdp=split)
    loaded = huggingface.load(path, declared, mesh, lambda message: None)
    stored = {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    layers = jax.device_get(loaded.layers)
    for layer in range(3):
        for expert in range(4):
            up = stored[f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight"].T
            np.testing.assert_array_equal(layers.up[layer, expert], up)
        np.testing.assert_array_equal(layers.router[layer], stored[f"model.layers.{layer}.mlp.gate.weight"].T)
    parts = {shard.data.size for shard in loaded.layers.down.addressable_shards}
    fsdp, ep, tp = mesh_shape
    assert parts == {loaded.layers.down.size // (ep * tp * (fsdp if split else 1))}


def test_tied_embeddings_have_no_head(tmp_path):
    path = tiny_model.write(tmp_path, dataclasses.replace(SPEC, tied=True))
    assert load(path).head is None


@pytest.mark.parametrize(
    "stored, wanted", [("bfloat16", jnp.float32), ("float32", jnp.bfloat16), ("bfloat16", jnp.bfloat16)]
)
def test_weights_have_the_declared_dtype_whatever_the_stored_one(tmp_path, stored, wanted):
    path = tiny_model.write(tmp_path, dataclasses.replace(SPEC, dtype=stored))
    weights = load(path, (1, 1, 2), dtype=wanted)
    expected = load_file(path / "model.safetensors")["model.layers.1.mlp.up_proj.weight"].T.astype(wanted)
    assert {leaf.dtype for leaf in jax.tree.leaves(weights)} == {jnp.dtype(wanted)}
    np.testing.assert_array_equal(np.asarray(weights.layers.up)[1], expected)


@pytest.mark.parametrize(
    "stored, wanted",
    [
        (jnp.bfloat16, jnp.bfloat16),
        (np.float16, jnp.bfloat16),
        (jnp.bfloat16, np.float32),
        (np.float32, np.float32),
    ],
)
@pytest.mark.parametrize("shape", [(3 * huggingface.BLOCK + 5, 70), (huggingface.BLOCK, 1), (7, 200)])
def test_blocks_of_a_matrix_are_transposed_each_to_its_place(shape, stored, wanted):
    matrix = np.random.default_rng(0).standard_normal(shape).astype(stored)
    place = np.full((shape[1] + 4, shape[0]), np.nan, wanted)
    huggingface._transpose(matrix, place[2:-2])
    np.testing.assert_array_equal(place[2:-2], matrix.astype(wanted).T)
    assert np.isnan(place[[0, 1, -2, -1]]).all()


def test_an_array_that_is_read_into_begins_where_a_cache_line_does():
    for size in (1, 100, 4097):
        array = huggingface._empty((size, 3), jnp.bfloat16)
        assert array.shape == (size, 3)
        assert array.ctypes.data % huggingface.ALIGNMENT == 0


def test_a_dtype_that_is_not_read_is_named(tmp_path):
    path = tiny_model.write(tmp_path, SPEC)
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(StartError, match="is stored as I8, which is not read"):
        load(path)


def test_a_sharded_checkpoint_is_the_same_model(checkpoint, tmp_path):
    path = tiny_model.write(tmp_path, dataclasses.replace(SPEC, n_shards=3))
    assert not (path / "model.safetensors").exists()
    jax.tree.map(np.testing.assert_array_equal, load(path, (2, 1, 2)), load(checkpoint))


def test_a_part_that_several_devices_hold_is_read_once(checkpoint, monkeypatch):
    read = []

    class CountedFiles(huggingface.Files):
        def tensor(self, name):
            read.append(name)
            return super().tensor(name)

    monkeypatch.setattr(huggingface, "Files", CountedFiles)
    load(checkpoint, (2, 2, 2))
    # Once to check the shape, then once per half of a matrix that tp splits, and once for a norm.
    assert read.count("model.layers.0.mlp.up_proj.weight") == 1 + 2
    assert read.count("model.norm.weight") == 1 + 1


def test_any_tree_of_weights_can_be_loaded(checkpoint):
    mesh = make_mesh(2, 1, 2)
    declared = {"some": [Weight((272, 32), P("tp", "fsdp"), np.float16, "lm_head.weight")], "none": None}
    loaded = huggingface.load(checkpoint, declared, mesh, lambda message: None)
    expected = load_file(checkpoint / "model.safetensors")["lm_head.weight"].astype(np.float16)
    np.testing.assert_array_equal(loaded["some"][0], expected)
    assert loaded["none"] is None


def test_progress_rises_to_100_percent(checkpoint):
    messages = []
    load(checkpoint, (2, 1, 4), progress=messages.append)
    percents = [int(message.removeprefix("loading weights ").removesuffix(" %")) for message in messages]
    assert percents[0] == 0
    assert percents[-1] == 100
    assert percents == sorted(set(percents))
    assert len(percents) > 10


def test_a_directory_without_safetensors_is_refused(tmp_path):
    path = tiny_model.write(tmp_path, SPEC)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(StartError, match=r"holds no weights: expected model\.safetensors, or"):
        load(path)


def rewrite(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def test_a_missing_tensor_is_named(tmp_path):
    path = tiny_model.write(tmp_path, SPEC)
    rewrite(path, lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"))
    with pytest.raises(StartError, match=r"no tensor 'model\.layers\.2\.mlp\.up_proj\.weight'"):
        load(path)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path):
    path = tiny_model.write(tmp_path, SPEC)
    rewrite(path, lambda tensors: tensors.update({"model.norm.weight": np.zeros(33, np.float32)}))
    with pytest.raises(StartError, match=r"model\.norm\.weight has the shape \[33\].* must be \[32\]"):
        load(path)


@pytest.mark.parametrize("kept", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_refused(tmp_path, kept):
    path = tiny_model.write(tmp_path, SPEC)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[: int(kept * file.stat().st_size)])
    with pytest.raises(StartError, match="half downloaded"):
        load(path)


def test_a_file_that_the_index_names_must_exist(tmp_path):
    path = tiny_model.write(tmp_path, dataclasses.replace(SPEC, n_shards=2))
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(StartError, match=r"model-00002-of-00002\.safetensors does not exist"):
        load(path)


@pytest.mark.parametrize(
    "index",
    ["{", "[]", "[" * 100_000, *map(json.dumps, ({"metadata": {}}, {"weight_map": {}}, {"weight_map": [1]}))],
)
def test_a_broken_index_is_refused(tmp_path, index):
    path = tiny_model.write(tmp_path, dataclasses.replace(SPEC, n_shards=2))
    (path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(StartError, match="is not a safetensors index"):
        load(path)


@pytest.mark.parametrize(
    "file",
    [
        3,
        None,
        ["a"],
        "",
        "..",
        "../model.safetensors",
        "/etc/passwd",
        "a\0.safetensors",
        300 * "a" + ".safetensors",
    ],
)
def test_an_index_names_files_that_are_beside_it(tmp_path, file):
    index = tmp_path / INDEX_FILE
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
    with pytest.raises(
        StartError, match=r"says that 'model\.norm\.weight' is in .* which is not the name of a"
    ):
        read_index(index)


def test_a_tensor_that_no_index_lists_is_found_and_the_index_decides_between_two(tmp_path):
    path = tiny_model.write(tmp_path, dataclasses.replace(SPEC, n_shards=2))
    index = json.loads((path / INDEX_FILE).read_text())
    norm, lists = "model.norm.weight", index["weight_map"]
    others = path / next(file for file in set(lists.values()) if file != lists[norm])
    save_file(load_file(others) | {norm: np.zeros(32, np.float32)}, others)
    assert np.asarray(load(path).final_norm).any()
    del lists[norm]
    (path / INDEX_FILE).write_text(json.dumps(index))
    assert norm in Files(path).names


def test_an_index_that_names_the_wrong_file_is_refused(tmp_path):
    path = tiny_model.write(tmp_path, dataclasses.replace(SPEC, n_shards=2))
    index = json.loads((path / "model.safetensors.index.json").read_text())
    index["weight_map"] = dict.fromkeys(index["weight_map"], "model-00002-of-00002.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(StartError, match="has no tensor 'model"):
        load(path)


def test_a_tensor_without_use_is_refused_before_anything_is_read(tmp_path):
    path = tiny_model.write(tmp_path, SPEC)
    rewrite(path, lambda tensors: tensors.update({"model.layers.7.self_attn.q_proj.bias": np.ones(4)}))
    model, mesh = read_model_config(path), make_mesh(1, 1, 1)
    declared, read = declare_weights(model, mesh, jnp.float32), []
    with pytest.raises(StartError, match=r"1 tensors for which config.json has no use \('model\.layers\.7\."):
        huggingface.load(path, declared, mesh, read.append, model.unread)
    assert not read
    huggingface.load(path, declared, mesh, read.append, Unread((r"model\.layers\.7\..*",)))
