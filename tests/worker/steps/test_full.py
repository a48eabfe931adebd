"""Full-parameter training: all weights move as torch moves them, on every mesh, and the sampler follows."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.errors import StartError
from spmd_tx.models.base_weights import weights
from spmd_tx.models.checkpoint import huggingface
from spmd_tx.models.checkpoint.files import Files
from spmd_tx.models.config import read_model_config
from spmd_tx.models.declared.model import Model
from spmd_tx.sharding.mesh import make_mesh
from spmd_tx.sharding.transfer import rows_to_devices, to_devices
from spmd_tx.sharding.weight import shardings
from spmd_tx.worker.steps.adamw import AdamWInputs
from spmd_tx.worker.steps.full import (
    FullState,
    full_state,
    groups_of,
    make_full_forward,
    make_full_forward_backward,
    make_full_optim_step,
    make_publish,
)
from spmd_tx.worker.storage.full_weights import TrainedTensors
from tests.golden.families import LENGTH as GOLDEN_LENGTH
from tests.golden.families import tokens, write
from tests.golden.full_cases import ADAM, FAMILIES, FULL, STEPS, is_kept
from tests.support.tiny_engine import (
    LENGTH,
    MIXTURE,
    MODEL,
    ROWS,
    Datum,
    mesh_name,
    named_factors,
    pack,
    random_arrays,
    random_datum,
    tiny_engine,
    to_numpy,
)

pytestmark = pytest.mark.usefixtures("quickly_compiled")

INPUTS = AdamWInputs(**ADAM)
ALL = (1.0, 1.0, 1.0)


class Full:
    """A model on one mesh, all of whose weights are trained."""

    def __init__(self, model: Model, shape=(1, 1, 1), dtype=jnp.float32, remat="full") -> None:
        self.mesh, self.model = make_mesh(*shape), model
        self.base = weights(model, self.mesh, dtype)
        self.declared = full_state(model, self.mesh)
        where = model, self.mesh, self.base, self.declared
        self.forward, self.forward_backward = (
            make_full_forward(*where),
            make_full_forward_backward(*where, remat),
        )
        self.optim_step = make_full_optim_step(model, self.mesh, self.declared)
        self.publish = make_publish(self.mesh, self.base)

    def state(self, w, groups=ALL) -> FullState:
        """Nothing has been trained yet. ``w`` are NumPy arrays."""
        zeros = jax.tree.map(np.zeros_like, w)
        state = FullState(w, zeros, zeros, zeros, np.zeros((), np.int32), np.array(groups, np.float32))
        return jax.tree.map(to_devices, state, shardings(self.mesh, self.declared))

    def random(self, seed=0):
        return random_arrays(self.declared.w, seed)

    def batch(self, rows):
        return rows_to_devices(self.mesh, pack(rows))

    def gradient(self, state: FullState, rows):
        """(state with the gradient added, logprobs, losses)"""
        grad_sum, logprobs, losses = self.forward_backward(state.w, state.grad_sum, None, *self.batch(rows))
        return state.replace(grad_sum=grad_sum), np.asarray(logprobs), np.asarray(losses)

    def step(self, state: FullState, **changed):
        return self.optim_step(state, jax.tree.map(np.float32, replace(INPUTS, **changed)))


def rows_of_all_losses():
    losses = ("cross_entropy", "importance_sampling", "ppo")
    return [(random_datum(row, 0, LENGTH - row, losses[row % 3]),) for row in range(ROWS)]


def stored(path: Path, full: Full, arrays) -> dict[str, np.ndarray]:
    """The tensors of a checkpoint that arrays stand for."""
    files = Files(path)
    tensors = TrainedTensors(files, arrays, full.declared.w, full.model)
    made = tensors.made_of(sorted(files.names))
    return {each.name: np.concatenate(list(tensors.content(each))) for each in made}


@pytest.mark.parametrize(
    "family, shape",
    [
        ("llama", (2, 1, 2)),
        *(pytest.param(family, (1, 1, 1), marks=pytest.mark.slow) for family in FAMILIES),
    ],
    ids=lambda value: value if isinstance(value, str) else mesh_name(value),
)
def test_five_steps_equal_those_of_torch(family, shape, tmp_path: Path):
    path = write(tmp_path / family, family)
    full = Full(read_model_config(path), shape)
    w = huggingface.load(path, full.declared.w, full.mesh, lambda _: None, full.model.unread)
    before = to_numpy(w)
    golden, sequence = np.load(FULL), tokens(family)
    length, zeros = GOLDEN_LENGTH - 1, np.zeros(GOLDEN_LENGTH - 1, np.float32)
    datum = Datum(0, sequence[:-1], sequence[1:], np.ones(length, np.float32), zeros, zeros)
    state = full.state(before)
    for number in range(STEPS):
        state, _, losses = full.gradient(state, [(datum,)])
        assert losses.sum() == pytest.approx(golden[f"{family}/losses"][number], rel=1e-4)
        state, metrics = full.step(state)
        assert metrics["applied"]
    moved = jax.tree.map(lambda x, y: (x - y) / INPUTS.learning_rate, to_numpy(state.w), before)
    compared = {name: x for name, x in stored(path, full, moved).items() if is_kept(name)}
    assert {f"{family}/{name}" for name in compared} == {
        key for key in golden.files if key.startswith(family) and not key.endswith("losses")
    }
    for name, actual in compared.items():
        expected = golden[f"{family}/{name}"].astype(np.float32)
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-3 * np.abs(expected).max(), err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 1, 2), (2, 2, 2), (8, 1, 1), (1, 1, 8), (2, 1, 4)], ids=mesh_name)
def test_a_mesh_computes_what_one_device_does(shape):
    one, many = Full(MODEL), Full(MODEL, shape)
    rows, w = rows_of_all_losses(), one.random()
    after_one, logprobs, losses = one.gradient(one.state(w), rows)
    after_many, logprobs_many, losses_many = many.gradient(many.state(w), rows)
    np.testing.assert_allclose(logprobs_many, logprobs, rtol=0, atol=2e-5)
    np.testing.assert_allclose(losses_many, losses, rtol=1e-4, atol=2e-4)
    found = named_factors(to_numpy(after_many.grad_sum))
    for name, leaf in named_factors(to_numpy(after_one.grad_sum)).items():
        assert np.any(leaf), name
        np.testing.assert_allclose(found[name], leaf, rtol=0, atol=1e-5 * np.abs(leaf).max(), err_msg=name)
    (state, metrics), (state_many, metrics_many) = one.step(after_one), many.step(after_many)
    for name, value in metrics.items():
        assert float(metrics_many[name]) == pytest.approx(float(value), rel=1e-5), name
    assert int(state_many.step) == int(state.step) == 1


@pytest.mark.slow
@pytest.mark.parametrize("groups", [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)], ids=str)
def test_only_groups_that_are_trained_move(groups):
    full = Full(MODEL)
    w = full.random()
    state, *_ = full.gradient(full.state(w, groups), rows_of_all_losses())
    after, metrics = full.step(state, weight_decay=0.5)
    trained = ("attn", "mlp", "unembed")[groups.index(1.0)]
    of_leaf = jax.tree.leaves(groups_of(MODEL))
    for group, old, new in zip(of_leaf, jax.tree.leaves(w), jax.tree.leaves(to_numpy(after.w)), strict=True):
        assert np.array_equal(old, new) == (group != trained), group
    assert float(metrics["grad_norm"]) == pytest.approx(float(metrics[f"grad_norm_{trained}"]))


@pytest.mark.slow
@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("bfloat16", 0.05)])
def test_the_published_copy_gives_the_log_probabilities_that_training_gives(dtype, tolerance, monkeypatch):
    """The pass that adapters use takes the copy, with adapters that are zero."""
    engine, full = tiny_engine(dtype=dtype), Full(MODEL, dtype=jnp.dtype(dtype))
    w = full.random()
    state, rows = full.state(w), [(random_datum(1, 0),)]
    trained, _ = full.forward(state.w, None, *full.batch(rows))
    nothing = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), engine.declared_train.w)
    published = full.publish(state.w)
    monkeypatch.setattr(engine, "base", published)
    passed, _ = engine.forward(nothing, rows)
    np.testing.assert_allclose(np.asarray(trained)[0], passed[0], rtol=0, atol=tolerance)
    for copy, of_training in zip(jax.tree.leaves(published), jax.tree.leaves(w), strict=True):
        assert np.array_equal(np.asarray(copy), of_training.astype(jnp.dtype(dtype)))


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_changes_nothing_but_itself():
    full = Full(MODEL)
    w = full.random()
    state, *_ = full.gradient(full.state(w), [(random_datum(1, 0).times(np.inf),)])
    after, metrics = full.step(state)
    assert not metrics["applied"]
    assert int(after.step) == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(to_numpy(after.grad_sum)))
    for old, new in zip(jax.tree.leaves(w), jax.tree.leaves(to_numpy(after.w)), strict=True):
        assert np.array_equal(old, new)


def test_a_mixture_is_refused():
    with pytest.raises(StartError, match=r"Qwen3MoeForCausalLM has experts.*LoRA"):
        full_state(MIXTURE, make_mesh(1, 1, 1))
