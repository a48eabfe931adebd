import dataclasses
import logging
import queue

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_tx.coordinator.wire.checkpoint_paths import check_new_name
from spmd_tx.models.adapters.lora import Adapters, Lora
from spmd_tx.models.base_weights import Weights
from spmd_tx.models.named import Named
from spmd_tx.sharding.mesh import make_mesh
from spmd_tx.worker.storage import checkpoints
from spmd_tx.worker.storage.checkpoints import (
    SlotState,
    restore_state,
    save_state,
    stored_arrays,
    write_in_background,
)

pytestmark = pytest.mark.usefixtures("quickly_compiled")

LAYERS, WIDTH_IN, WIDTH_OUT, VOCABULARY = 3, 16, 8, 32
MESHES = [(1, 1, 1), (8, 1, 1), (2, 2, 2), (1, 1, 8)]
SPECS = Adapters(
    {"q": Lora(P(None, None, "fsdp"), P(None, None, ("tp", "fsdp"))), "o": Lora(P(None, None, "tp"), P())},
    Lora(P(), P(None, "tp")),
)


def host_state(rank, content=None):
    """A state of this rank; without ``content``, its own number in each element."""
    random = np.random.default_rng(rank)

    def pair(*lead):
        shapes = ((*lead, rank, WIDTH_IN), (*lead, rank, WIDTH_OUT if lead else VOCABULARY))
        return Lora(*(random.standard_normal(shape).astype(np.float32) for shape in shapes))

    def adapters():
        return Adapters({"q": pair(LAYERS), "o": pair(LAYERS)}, pair())

    return SlotState(adapters(), adapters(), adapters(), np.int32(7))


def shardings(mesh_shape):
    mesh = make_mesh(*mesh_shape)
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        SlotState(SPECS, SPECS, SPECS, P()),
        is_leaf=lambda leaf: isinstance(leaf, P),
    )


def on_mesh(state, mesh_shape):
    return jax.tree.map(jax.device_put, state, shardings(mesh_shape))


def like(rank, mesh_shape):
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        host_state(rank),
        shardings(mesh_shape),
    )


def cut(state, rank):
    return jax.tree.map(lambda x: x[..., :rank, :] if x.ndim else x, state)


def pad(state, rank):
    def leaf(x):
        missing = rank - x.shape[-2] if x.ndim else 0
        return np.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, missing), (0, 0)]) if missing else x

    return jax.tree.map(leaf, state)


def assert_equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_a_state_is_read_from_every_folder_that_a_name_can_make(tmp_path):
    state, name = host_state(4), " ".join("!\"$&'()+,-.:;<=>@^_`{|}~é漢")
    check_new_name(name)
    save_state(tmp_path / f".{name}.0123.staged", on_mesh(state, (1, 1, 1)), None)
    (tmp_path / f".{name}.0123.staged").rename(tmp_path / name)
    restored = restore_state(tmp_path / name, like(4, (1, 1, 1)))
    jax.tree.map(np.testing.assert_array_equal, restored, state)


@pytest.mark.parametrize("saved_on", MESHES)
@pytest.mark.parametrize("restored_on", [(1, 1, 1), (2, 1, 4)])
def test_a_slot_comes_back_bit_for_bit_on_any_mesh(tmp_path, saved_on, restored_on):
    state = host_state(rank=4)
    save_state(tmp_path / "slot", on_mesh(state, saved_on), rank=4)
    restored = restore_state(tmp_path / "slot", like(4, restored_on))
    assert_equal(restored, state)
    assert jax.tree.map(lambda x: x.sharding, restored) == shardings(restored_on)
    assert restored.step.dtype == jnp.int32


def test_a_slot_that_is_stored_in_many_chunks_comes_back_on_another_mesh(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "CHUNK_BYTES", 128)
    monkeypatch.setattr(checkpoints, "LEAST_CHUNK_BYTES", 32)
    state = host_state(rank=4)
    save_state(tmp_path / "slot", on_mesh(state, (2, 2, 2)), rank=4)
    stored = stored_arrays(tmp_path / "slot")["w"]
    assert stored["layers"]["q"]["a"].storage.chunk_shape[0] == 1
    assert stored["head"]["b"].storage.chunk_shape != (4, VOCABULARY)
    assert_equal(restore_state(tmp_path / "slot", like(4, (2, 1, 4))), state)


@pytest.mark.parametrize("maximum", [4, 6, 16])
def test_a_server_with_another_maximum_rank_pads_with_zeros(tmp_path, maximum):
    state = pad(host_state(rank=4), 8)
    save_state(tmp_path / "slot", on_mesh(state, (2, 2, 2)), rank=4)
    assert_equal(restore_state(tmp_path / "slot", like(maximum, (2, 1, 2))), pad(cut(state, 4), maximum))


def test_a_state_saved_with_its_padding_is_cut(tmp_path):
    state = pad(host_state(rank=4), 8)
    save_state(tmp_path / "slot", on_mesh(state, (2, 2, 2)), rank=8)
    assert_equal(restore_state(tmp_path / "slot", like(4, (8, 1, 1))), cut(state, 4))


def test_without_optimizer_only_the_weights_are_read(tmp_path):
    state = host_state(rank=4)
    save_state(tmp_path / "slot", on_mesh(state, (2, 2, 2)), rank=4)
    restored = restore_state(tmp_path / "slot", like(6, (2, 2, 2)), optimizer=False)
    fresh = jax.tree.map(np.zeros_like, state)
    assert_equal(restored, pad(dataclasses.replace(fresh, w=state.w), 6))
    assert jax.tree.map(lambda x: x.sharding, restored) == shardings((2, 2, 2))


def test_a_directory_may_hold_other_files_and_may_be_moved(tmp_path):
    state = host_state(rank=4)
    save_state(tmp_path / ".partial", on_mesh(state, (1, 1, 1)), rank=4)
    (tmp_path / ".partial" / "checkpoint.json").write_text("{}")
    (tmp_path / ".partial").rename(tmp_path / "slot")
    assert_equal(restore_state(tmp_path / "slot", like(4, (1, 1, 1))), state)


def test_a_field_that_holds_nothing_need_not_be_there(tmp_path):
    """Whole models got ``images``, which models without a tower leave empty, when there were checkpoints."""
    place = NamedSharding(make_mesh(1, 1, 1), P())

    def state(fields, leaf):
        layers = Named({"up": leaf((3, 2))})
        arrays = {"embed": leaf((4, 2)), "layers": layers, "final_norm": leaf((2,)), "head": None}
        return SlotState(*(fields(**arrays) for _ in range(3)), leaf(()))

    def array(shape):
        return jax.device_put(np.arange(np.prod(shape), dtype=np.float32).reshape(shape), place)

    wanted = state(Weights, lambda shape: jax.ShapeDtypeStruct(shape, np.float32, sharding=place))
    save_state(tmp_path / "slot", state(dict, array), None)
    assert_equal(restore_state(tmp_path / "slot", wanted), state(Weights, array))


def test_an_earlier_checkpoint_is_replaced(tmp_path):
    save_state(tmp_path / "slot", on_mesh(host_state(rank=6), (1, 1, 1)), rank=6)
    save_state(tmp_path / "slot", on_mesh(host_state(rank=4), (1, 1, 1)), rank=4)
    assert_equal(restore_state(tmp_path / "slot", like(4, (1, 1, 1))), host_state(rank=4))
    assert [path.name for path in tmp_path.iterdir()] == ["slot"]


def test_saving_and_restoring_is_quiet(tmp_path, caplog, capfd):
    with caplog.at_level(logging.WARNING):
        save_state(tmp_path / "slot", on_mesh(host_state(rank=4), (1, 1, 1)), rank=4)
        restore_state(tmp_path / "slot", like(4, (1, 1, 1)))
    # Of clients that earlier tests of this process left, some still look for their servers.
    assert [record for record in caplog.records if record.name.partition(".")[0] != "tinker"] == []
    assert capfd.readouterr().err == ""


def test_a_snapshot_holds_the_state_of_its_moment_and_says_when_it_is_complete(tmp_path):
    ends = queue.Queue()
    path = tmp_path / "model" / ".7.0123456789abcdef.staged"  # as the coordinator names it
    write_in_background(path, on_mesh(host_state(4), (2, 2, 2)), 4, lambda *end: ends.put(end))
    assert ends.get(timeout=60) == (str(path), None)
    restored = restore_state(path, like(4, (2, 2, 2)))
    jax.tree.map(np.testing.assert_array_equal, restored, host_state(4))
