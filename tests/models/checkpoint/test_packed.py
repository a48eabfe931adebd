"""Experts that stay encoded on devices give the bits of those that are decoded while they are loaded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.errors import StartError
from spmd_tx.models.base_weights import weights
from spmd_tx.models.checkpoint import files as checkpoint_files
from spmd_tx.models.checkpoint import huggingface
from spmd_tx.models.checkpoint.packed import Packed, decoded
from spmd_tx.models.config import read_model_config
from spmd_tx.sharding.mesh import make_mesh
from spmd_tx.sharding.weight import specs
from spmd_tx.worker.memory.sizes import bytes_per_device
from tests.support import encoded_models

BITS = {"mxfp4": 4 + 8 / 32, "fp8": 8 + 32 / 16, "int4": 4 + 16 / 32}  # of a number, with its part of a scale

pytestmark = pytest.mark.usefixtures("quickly_compiled")


@pytest.fixture(params=encoded_models.MODELS)
def checkpoint(request, tmp_path):
    return request.param, encoded_models.write(tmp_path / request.param, request.param)


def loaded(path, mesh, expert_weights):
    model = read_model_config(path, expert_weights=expert_weights)
    declared = weights(model, mesh, jnp.float32, split_over_fsdp=True)
    return declared, huggingface.load(path, declared, mesh, lambda _: None, model.unread)


def test_packed_experts_decode_to_what_is_loaded_otherwise(checkpoint):
    name, path = checkpoint
    mesh = make_mesh(2, 2, 2)
    declared, packed = loaded(path, mesh, "packed")
    plainly_declared, plain = loaded(path, mesh, "unpacked")
    experts = {each for each in packed.layers if isinstance(packed.layers[each], Packed)}
    assert {each.rpartition(".")[2] for each in experts} == {"gate", "up", "down"}
    found = jax.jit(lambda layers: {each: decoded(layers[each], jnp.float32) for each in layers})(
        packed.layers
    )
    for each in plain.layers:
        assert np.array_equal(found[each], plain.layers[each]), each
        if each in experts:
            assert packed.layers[each].shape == plain.layers[each].shape
            size = bytes_per_device(mesh, declared.layers[each])
            assert size / bytes_per_device(mesh, plainly_declared.layers[each]) == BITS[name] / 32
            assert specs(declared).layers[each].numbers == specs(plainly_declared).layers[each]


def test_a_model_without_encoded_experts_cannot_be_packed(tmp_path):
    path = encoded_models.write(tmp_path, "mxfp4", quantization_config=None)
    with pytest.raises(StartError, match=r"--expert-weights is packed, but .* leave the option out"):
        read_model_config(path, expert_weights="packed")


def test_groups_of_a_scale_must_be_whole(tmp_path):
    path = encoded_models.write(tmp_path, "fp8", moe_intermediate_size=24)
    with pytest.raises(StartError, match=r"24 inputs of experts are not a multiple of 16"):
        read_model_config(path, expert_weights="packed")


def test_scales_that_would_be_rounded_are_refused(tmp_path, monkeypatch):
    path = encoded_models.write(tmp_path, "int4")
    wide = {"BF16": checkpoint_files.DTYPES["F16"]}
    monkeypatch.setattr(checkpoint_files, "DTYPES", checkpoint_files.DTYPES | wide)
    with pytest.raises(
        StartError, match=r"stored as float16, but matrices stay encoded only with .*bfloat16"
    ):
        loaded(path, make_mesh(1, 1, 1), "packed")
