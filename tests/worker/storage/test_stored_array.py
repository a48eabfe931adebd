"""Arrays of a checkpoint are read a layer, or some rows, at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.errors import StartError
from spmd_tx.models.base_weights import Weights
from spmd_tx.models.named import Named
from spmd_tx.worker.storage import checkpoints, stored_array
from spmd_tx.worker.storage.checkpoints import SlotState, restore_state, save_state
from spmd_tx.worker.storage.stored_array import StoredArray

ROWS, PRIME, WIDTH = 12, 13, 8  # a row has 32 bytes


@pytest.fixture
def state(monkeypatch):
    """A state whose arrays count as large."""
    monkeypatch.setattr(checkpoints, "CHUNK_BYTES", 128)
    monkeypatch.setattr(checkpoints, "LEAST_CHUNK_BYTES", 64)
    monkeypatch.setattr(stored_array, "MOST_BYTES", 256)
    q = jnp.asarray(np.random.default_rng(0).standard_normal((3, 64, WIDTH), np.float32))
    tables = (jnp.arange(rows * WIDTH, dtype=jnp.float32).reshape(rows, WIDTH) for rows in (ROWS, PRIME))
    w = Weights(next(tables), Named({"q": q}), jnp.ones(WIDTH), next(tables))
    return SlotState(w, w, w, jnp.int32(3))


def test_layers_and_rows_are_read_alone_and_what_cannot_be_is_copied(tmp_path, state):
    save_state(tmp_path / "slot", state, None)
    q, embed, head = (StoredArray(tmp_path / "slot", f"w.{name}") for name in ("layers.q", "embed", "head"))
    np.testing.assert_array_equal(q[1], state.w.layers.q[1])
    np.testing.assert_array_equal(embed[5:9], state.w.embed[5:9])
    assert [each.is_stored_in_order for each in (q, embed, head)] == [True, True, False]
    for array, expected in ((q, state.w.layers.q), (head, state.w.head)):
        np.testing.assert_array_equal(array.copy(tmp_path / "copy.npy"), expected)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    jax.tree.map(np.testing.assert_array_equal, restore_state(tmp_path / "slot", like), state)


def test_a_damaged_array_is_named(tmp_path, state):
    save_state(tmp_path / "slot", state, None)
    q = StoredArray(tmp_path / "slot", "w.layers.q")
    for each in (tmp_path / "slot/ocdbt.process_0/d").iterdir():
        each.write_bytes(b"")
    with pytest.raises(StartError, match=r"w\.layers\.q of .*slot cannot be read, or is damaged"):
        q[1]
    with pytest.raises(StartError, match=r"w\.other of .*slot cannot be read"):
        StoredArray(tmp_path / "slot", "w.other")
