"""A checkpoint of another base model is refused with what both have, however it was written."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from spmd_tx.coordinator.checkpoints.files import Manifest
from spmd_tx.coordinator.checkpoints.shapes import check_shapes
from spmd_tx.demo import tiny_model
from spmd_tx.errors import ForeignWeights, InvalidRequest
from spmd_tx.models.adapters.lora import Lora, for_maps, shapes
from spmd_tx.models.base_weights import weights
from spmd_tx.models.config import read_model_config
from spmd_tx.protocol.commands import AdapterSpec
from spmd_tx.sharding.mesh import make_mesh
from spmd_tx.worker.storage.checkpoints import SlotState, restore_weights, save_state
from tests.support.adapter_folders import write_folder
from tests.support.model_shapes import TINY, resized

MIXTURE = resized(TINY, architecture="Qwen3MoeForCausalLM", d_ff=16, n_experts=4, experts_per_token=2)
PER_EXPERT = replace(MIXTURE, expert_lora="per-expert")
ADAPTER = AdapterSpec(rank=4, train_unembed=False)
OTHERS = [
    resized(TINY, d_model=TINY.d_model + 32),
    resized(TINY, n_layers=TINY.n_layers + 1),
    resized(TINY, n_layers=TINY.n_layers - 1),
    resized(TINY, n_heads=2 * TINY.n_heads),
    resized(TINY, d_ff=TINY.d_ff + 16),
]


def manifest(rank):
    return Manifest(
        run_id="s:train:0",
        base_model="mine/tiny",
        rank=rank,
        alpha=8.0,
        train_attn=True,
        train_mlp=True,
        train_unembed=False,
        created_at=0.0,
        expires_at=None,
        user_metadata=None,
        files={},
    )


def check(folder, model, rank=4):
    check_shapes("checkpoint tinker://s/weights/a", folder, manifest(rank), model, "mine/tiny")


def state_of(model, rank):
    def pair(name):
        its = shapes(model, name, rank)
        return Lora(jnp.zeros(its.a, jnp.float32), jnp.zeros(its.b, jnp.float32))

    w = for_maps(model, pair)
    return SlotState(w, w, w, jnp.int32(0))


def write(path, model, form, rank=4):
    if form == "peft":
        return write_folder(path, ADAPTER, model, "mine/tiny")
    save_state(path, state_of(model, rank), 4)
    return path


@pytest.mark.parametrize("form", ["peft", "training"])
@pytest.mark.parametrize("model", [TINY, MIXTURE, PER_EXPERT], ids=["dense", "shared", "per-expert"])
def test_a_checkpoint_of_this_model_is_taken_whatever_its_padding(tmp_path, form, model):
    check(write(tmp_path / "a", model, form, rank=16), model)


@pytest.mark.parametrize("form", ["peft", "training"])
@pytest.mark.parametrize("other", OTHERS, ids=["width", "more-layers", "fewer-layers", "heads", "mlp"])
def test_a_checkpoint_of_another_model_is_refused_with_both_shapes_and_both_names(tmp_path, form, other):
    folder = write(tmp_path / "a", TINY, form)
    message = (
        r"tinker://s/weights/a was .* 'mine/tiny', in which (.*) is (\[|not).*in 'mine/tiny', .* is (\[|not)"
    )
    with pytest.raises(InvalidRequest, match=message):
        check(folder, other)


def test_a_worker_refuses_what_it_would_pad_or_cut(tmp_path):
    folder = write(tmp_path / "a", TINY, "training")
    device = SingleDeviceSharding(jax.devices()[0])
    for other in OTHERS:
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), state_of(other, 8).w
        )
        with pytest.raises(
            ForeignWeights, match=r"of another base model: in it (.*) is (\[|not).*here (\[|not)"
        ):
            restore_weights(folder, like)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_the_weights_of_a_whole_model_are_compared(tmp_path, family):
    paths = [
        tiny_model.write(tmp_path / str(width), tiny_model.Spec(family=family, d_model=width))
        for width in (64, 96)
    ]
    model, other = map(read_model_config, paths)
    w = jax.tree.map(
        lambda each: jnp.zeros(each.shape, jnp.float32), weights(model, make_mesh(1, 1, 1), np.float32)
    )
    save_state(tmp_path / "state", SlotState(w, w, w, jnp.int32(0)), None)
    for folder in (tmp_path / "state", paths[0]):
        check(folder, model, rank=0)
        with pytest.raises(InvalidRequest, match=r"64.*; in 'mine/tiny', .*96"):
            check(folder, other, rank=0)
    (paths[0] / "config.json").write_text(json.dumps({}))
    with pytest.raises(InvalidRequest, match="is damaged"):
        check(paths[0], model, rank=0)
