"""Base models that are kept in fewer bits are rounded as declared, alike on all meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spmd_tx.errors import StartError
from spmd_tx.models.base_weights import weights
from spmd_tx.models.checkpoint import huggingface
from spmd_tx.models.checkpoint.encoders import encode_groups
from spmd_tx.models.checkpoint.packed import Packed, decoded
from spmd_tx.models.config import read_model_config
from spmd_tx.models.declared.encoding import BASE_DTYPES
from spmd_tx.sharding.mesh import make_mesh
from spmd_tx.worker.memory.sizes import bytes_per_device
from tests.golden import families
from tests.support import encoded_models
from tests.support.family_logits import logits

pytestmark = pytest.mark.usefixtures("quickly_compiled")

BITS = {"int8": 8 + 16 / 32, "fp8": 8 + 32 / 64, "int4": 4 + 16 / 32}  # of a number, with its part of a scale
# Half the widest step between two numbers, of the largest that shares the scale, and what bfloat16 rounds.
ROUNDED = {"int8": 1 / 254 + 1 / 128, "fp8": 1 / 28 + 1 / 256, "int4": 1 / 14 + 1 / 128}
# Two groups or more for each of two devices.
WIDE = {"hidden_size": 128, "num_attention_heads": 8, "intermediate_size": 128, "moe_intermediate_size": 128}


@pytest.fixture(
    scope="module",
    params=["llama", *(pytest.param(each, marks=pytest.mark.slow) for each in ("glm4_moe", "gpt_oss"))],
)
def path(request, tmp_path_factory):
    return families.write(tmp_path_factory.mktemp("model"), request.param, **WIDE)


def loaded(path, mesh, base_dtype="auto"):
    model = read_model_config(path, base_dtype=base_dtype)
    declared = weights(model, mesh, jnp.float32, split_over_fsdp=True)
    return model, declared, huggingface.load(path, declared, mesh, lambda _: None, model.unread)


@pytest.mark.parametrize("base_dtype", BASE_DTYPES)
def test_adapted_maps_are_rounded_group_by_group(path, base_dtype):
    mesh = make_mesh(2, 2, 2)
    model, declared, kept = loaded(path, mesh, base_dtype)
    _, as_stored, plain = loaded(path, mesh)
    names = {each for each in kept.layers if isinstance(kept.layers[each], Packed)}
    assert names == set(model.adapted) - {"head"}
    found = jax.jit(lambda layers: {each: decoded(layers[each], jnp.float32) for each in names})(kept.layers)
    encoding = BASE_DTYPES[base_dtype]
    for name in plain.layers:
        layer = plain.layers[name]
        if name not in names:
            assert np.array_equal(kept.layers[name], layer), name
            continue
        groups = np.asarray(layer).reshape(*layer.shape[:-2], -1, encoding.group, layer.shape[-1])
        error = np.abs(np.asarray(found[name]).reshape(groups.shape) - groups).max(-2)
        assert (error <= ROUNDED[base_dtype] * np.abs(groups).max(-2)).all(), name
        assert error.max() > 0
        size = bytes_per_device(mesh, declared.layers[name])
        assert size / bytes_per_device(mesh, as_stored.layers[name]) == BITS[base_dtype] / 32


@pytest.mark.parametrize("base_dtype", BASE_DTYPES)
def test_a_matrix_of_zeros_stays_so_and_large_numbers_fit(base_dtype):
    encoding = BASE_DTYPES[base_dtype]
    matrix_OI = np.zeros((3, 128), np.float32)
    matrix_OI[1, :64], matrix_OI[2, 7] = 1e30, -1e-30
    numbers, scales = (jnp.asarray(each.T) for each in encode_groups(encoding, matrix_OI))
    found = np.asarray(decoded(Packed(numbers, scales, encoding), jnp.float32)).T
    assert not found[0].any()
    np.testing.assert_allclose(found[1], matrix_OI[1], rtol=1 / 100)
    assert np.isfinite(found).all()


def test_what_cannot_be_cut_is_refused(tmp_path):
    narrow = families.write(tmp_path / "narrow", "llama")
    with pytest.raises(StartError, match=r"the 32 inputs of q are not a multiple of 64, which share a scale"):
        read_model_config(narrow, base_dtype="fp8")


def write_encoded(path, stored):
    values = {} if stored == "mxfp4" else {"v_head_dim": 16}  # of latent attention
    return encoded_models.write(path, stored, **WIDE, **values)


FEW_BITS = {"mxfp4": ("int8", "fp8", "int4"), "fp8": ("int8", "fp8"), "int4": ("int8", "fp8", "int4")}


@pytest.mark.parametrize(
    "stored, base_dtype",
    [
        ("mxfp4", "int8"),
        ("fp8", "int4"),
        *(
            pytest.param(stored, base_dtype, marks=pytest.mark.slow)
            for stored in encoded_models.MODELS
            for base_dtype in BASE_DTYPES
            if (stored, base_dtype) not in (("mxfp4", "int8"), ("fp8", "int4"))
        ),
    ],
)
def test_what_has_few_bits_stays_as_it_is_and_the_rest_is_rounded(stored, base_dtype, tmp_path):
    path, mesh = write_encoded(tmp_path / "encoded", stored), make_mesh(1, 1, 1)
    model, _, kept = loaded(path, mesh, base_dtype)
    plain = loaded(path, mesh)[2]
    maps = {name: each.map for name, each in model.adapted.items() if name in kept.layers}
    assert any(each.source.encoding is not None for each in maps.values())
    find = jax.jit(lambda layers: {each: decoded(layers[each], jnp.float32) for each in maps})
    for name, found in find(kept.layers).items():
        layer, stored_as = np.asarray(plain.layers[name]), maps[name].source.encoding
        if stored_as is not None and base_dtype in FEW_BITS[stored]:
            assert maps[name].kept == stored_as
            np.testing.assert_array_equal(found, layer, err_msg=name)
            continue
        encoding = BASE_DTYPES[base_dtype]
        assert maps[name].kept == encoding
        groups = layer.reshape(*layer.shape[:-2], -1, encoding.group, layer.shape[-1])
        error = np.abs(np.asarray(found).reshape(groups.shape) - groups).max(-2)
        assert (error <= ROUNDED[base_dtype] * np.abs(groups).max(-2)).all(), name
        assert error.max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("stored, base_dtype", [("mxfp4", "int8"), ("fp8", "int4"), ("int4", "int4")])
def test_of_encoded_checkpoints_all_meshes_have_the_same_logits(stored, base_dtype, tmp_path):
    path = write_encoded(tmp_path / "encoded", stored)
    tokens = np.random.default_rng(0).integers(0, 96, 40, dtype=np.int32)
    found, split = (
        logits(make_mesh(*shape), path, tokens, base_dtype=base_dtype) for shape in ((1, 1, 1), (2, 2, 2))
    )
    np.testing.assert_allclose(split, found, rtol=0, atol=5e-5 * np.abs(found).max())


def test_packed_experts_and_the_rest_in_fewer_bits(tmp_path):
    path = write_encoded(tmp_path / "encoded", "fp8")
    model = read_model_config(path, expert_weights="packed", base_dtype="int4")
    kept = {type(each.map.kept).__name__ for each in model.adapted.values() if each.map.experts}
    others = {each.map.kept for each in model.adapted.values() if not each.map.experts}
    assert kept == {"Fp8Blocks"}
    assert BASE_DTYPES["int4"] in others


@pytest.mark.slow
@pytest.mark.parametrize("base_dtype", BASE_DTYPES)
def test_logits_are_those_of_the_rounded_model_on_all_meshes(path, tmp_path, base_dtype):
    """A checkpoint of the decoded matrices has the same logits, and so has every mesh."""
    tokens = np.random.default_rng(0).integers(0, 96, 40, dtype=np.int32)
    found = logits(make_mesh(1, 1, 1), path, tokens, base_dtype=base_dtype)
    model, _, kept = loaded(path, make_mesh(1, 1, 1), base_dtype)
    write_decoded(path, tmp_path / "rounded", model, kept)
    rounded = logits(make_mesh(1, 1, 1), tmp_path / "rounded", tokens)
    largest = np.abs(rounded).max()
    np.testing.assert_allclose(found, rounded, rtol=0, atol=5e-5 * largest)
    split = logits(make_mesh(2, 2, 2), path, tokens, base_dtype=base_dtype)
    np.testing.assert_allclose(split, found, rtol=0, atol=5e-5 * largest)


def write_decoded(path, place, model, kept):
    place.mkdir()
    (place / "config.json").write_bytes((path / "config.json").read_bytes())
    tensors = load_file(path / "model.safetensors")
    for name, each in model.adapted.items():
        if name == "head":
            continue
        matrices = np.asarray(decoded(kept.layers[name], jnp.float32))
        for layer, number in enumerate(each.numbers):
            for expert in range(each.map.experts or 1):
                source = each.map.source
                stored = tensors[source.name.format(layer=number, expert=expert)]
                stored = stored[expert] if source.stacked else stored
                stored = stored if source.transposed else stored.T
                matrix = matrices[layer, expert] if each.map.experts else matrices[layer]
                stored[slice(*source.rows or (None,))] = matrix.T
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
