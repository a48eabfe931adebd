"""Models all of whose weights are trained take turns on the device, and wait in files if memory is short."""

import jax
import numpy as np
import pytest

from spmd_tx.demo import tiny_model
from spmd_tx.errors import ForeignWeights
from spmd_tx.protocol import commands
from spmd_tx.protocol.places import Idle
from spmd_tx.worker.engine import Engine
from spmd_tx.worker.programs.compiled import Programs
from spmd_tx.worker.stores import store
from tests.golden import vision_cases
from tests.support import moves, seeing_engine
from tests.support.tiny_engine import to_numpy
from tests.support.tiny_setup import tiny_setup

pytestmark = pytest.mark.usefixtures("quickly_compiled")

ADAPTER = commands.AdapterSpec(rank=0)


@pytest.mark.parametrize("budget, is_on_disk", [(0, True), (1 << 30, False)])
def test_a_model_that_waited_is_bit_for_bit_what_it_was(budget, is_on_disk, tmp_path, monkeypatch):
    monkeypatch.setattr(store, "idle_budget", lambda processes: budget)
    model = tiny_model.write(tmp_path / "model", tiny_model.Spec())
    places = {"model_dir": str(model), "idle_adapters": str(tmp_path / "idle"), "compilation_cache": ""}
    setup = tiny_setup(full_copies=3, bank_slots=1, max_rank=1, **places)
    engine = Engine.start(setup, Programs(lambda what: None), lambda what: None)
    chance = np.random.default_rng(0)

    def begin() -> list[np.ndarray]:
        """Put a model into the slot, as if it had been trained."""
        engine.execute(moves.create_adapter(adapter=ADAPTER))
        engine.state.train = jax.tree.map(
            lambda leaf: jax.device_put(chance.normal(size=leaf.shape).astype(leaf.dtype), leaf.sharding),
            engine.state.train,
        )
        return jax.tree.leaves(to_numpy(engine.state.train))

    first = begin()
    engine.execute(moves.swap_out(0, "first"))
    second = begin()
    _, metrics = engine.execute(moves.swap_out(0, "second"))
    for model_id, expected in (("first", first), ("second", second)):
        _, found = engine.execute(moves.swap_in(0, model_id))
        assert found["from_disk"] == is_on_disk
        assert all(map(np.array_equal, jax.tree.leaves(to_numpy(engine.state.train)), expected))
        engine.execute(moves.swap_out(0, model_id))
    size = sum(leaf.nbytes for leaf in (*first, *second))
    assert metrics["host_bytes"] + metrics["disk_bytes"] >= size
    engine.execute(commands.Drop(places=[Idle("first"), Idle("second")]))
    engine.store._idle.settle()
    assert not any(path.is_file() for path in (tmp_path / "idle").rglob("*"))


def test_folders_of_another_base_model_are_refused_and_nothing_is_changed(tmp_path):
    engines = [
        start(tiny_model.write(tmp_path / str(width) / "model", tiny_model.Spec(d_model=width)))
        for width in (64, 96)
    ]
    other, engine = engines
    other.execute(moves.create_adapter(adapter=ADAPTER))
    other.execute(moves.save_state(0, tmp_path / "state", ADAPTER))
    engine.execute(moves.create_adapter(adapter=ADAPTER))
    engine.execute(moves.save_sampler(0, 1, ADAPTER))
    before = jax.tree.leaves(to_numpy((engine.state.train, engine.store._copies)))
    of_other = tmp_path / "64" / "model"
    for load in (
        moves.load_state(0, tmp_path / "state", ADAPTER, optimizer=True),
        moves.load_state(0, of_other, ADAPTER, optimizer=False),
        moves.load_sampler(1, of_other, ADAPTER),
    ):
        with pytest.raises(ForeignWeights, match=r"of another base model: .*64.*96"):
            engine.execute(load)
    after = jax.tree.leaves(to_numpy((engine.state.train, engine.store._copies)))
    assert all(map(np.array_equal, after, before))


def start(model):
    setup = tiny_setup(
        model_dir=str(model),
        idle_adapters=str(model.parent / "idle"),
        compilation_cache="",
        full_copies=3,
        bank_slots=3,
        max_rank=1,
    )
    return Engine.start(setup, Programs(lambda what: None), lambda what: None)


@pytest.mark.parametrize(
    "name, shape", [pytest.param("qwen3_5", (1, 1, 1), marks=pytest.mark.slow), ("qwen3_vl", (2, 1, 2))]
)
def test_all_weights_of_the_language_model_train_on_images_and_the_tower_stays(name, shape, tmp_path):
    options = {"full_copies": 3, "bank_slots": 2, "idle_adapters": str(tmp_path / "idle")}
    engine = seeing_engine.start(tmp_path, name, shape, **options)
    seeing_engine.encode_prompt(engine)
    engine.execute(moves.create_adapter(adapter=ADAPTER))
    tokens, where = seeing_engine.prompt(), seeing_engine.places(name)
    row = seeing_engine.row_of(engine, tokens, where)
    before = seeing_engine.forward(engine, tokens, where)
    read = seeing_engine.prefill(engine, tokens, where)
    is_text = np.flatnonzero(~vision_cases.is_image()[1:])
    np.testing.assert_allclose(read[is_text], before[is_text], rtol=0, atol=1e-4)
    engine.execute(commands.ForwardBackward(rows=row, loss=seeing_engine.loss(row, vision_cases.FROM)))
    golden = np.load(vision_cases.NUMBERS)
    for each in vision_cases.sloped(engine.model):
        found = np.asarray(engine.state.train.grad_sum.layers[each])[:, :, : vision_cases.KEPT]
        wanted = golden[f"{name}/slope/{each}"]
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * np.abs(wanted).max(), err_msg=each)

    frozen = to_numpy((engine.state.tower, seeing_engine.pool(engine)))
    rest = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0, "grad_clip_norm": 0.0}
    engine.execute(commands.OptimStep(slot=0, learning_rate=1e-2, **rest))
    engine.execute(moves.save_sampler(0, 1, ADAPTER))
    after = seeing_engine.forward(engine, tokens, where)
    assert np.abs(after - before)[is_text].max() > 0.01
    of_copy = seeing_engine.prefill(engine, tokens, where, slot=1)
    np.testing.assert_allclose(of_copy[is_text], after[is_text], rtol=0, atol=1e-4)
    kept = to_numpy((engine.state.tower, seeing_engine.pool(engine)))
    assert all(map(np.array_equal, jax.tree.leaves(kept), jax.tree.leaves(frozen)))
