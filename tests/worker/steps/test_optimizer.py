"""optim_step is torch.optim.AdamW on one slot, and nobody else's slot."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from spmd_tx.worker.steps.adamw import AdamWInputs
from spmd_tx.worker.steps.train_state import TrainState
from tests.support.tiny_engine import (
    RANK,
    SCALES,
    SLOTS,
    deal,
    mesh_name,
    named_factors,
    random_adapters,
    random_datum,
    slot_of,
    tiny_engine,
)

pytestmark = pytest.mark.usefixtures("quickly_compiled")

SLOT = 1
DEFAULTS = AdamWInputs(
    learning_rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, grad_clip_norm=0.0
)


@pytest.fixture(scope="module", params=[(1, 1, 1), (2, 1, 4)], ids=mesh_name)
def engine(request):
    return tiny_engine(request.param)


def fresh_state(w=None) -> TrainState:
    """As after creation: no gradient, no moments."""
    w = random_adapters(seed=1) if w is None else w
    zeros = jax.tree.map(np.zeros_like, w)
    return TrainState(w, zeros, zeros, zeros, np.zeros(SLOTS, np.int32), SCALES)


def used_state() -> TrainState:
    """All slots in the middle of a run."""
    nu = jax.tree.map(np.square, random_adapters(seed=4))
    steps = np.array([3, 1, 4, 1], np.int32)
    return TrainState(random_adapters(1), random_adapters(2), random_adapters(3), nu, steps, SCALES)


def with_gradient(state: TrainState, seed: int, slot: int = SLOT) -> TrainState:
    """A random gradient in one slot."""
    gradient = random_adapters(seed)
    for stacked in jax.tree.leaves(gradient):
        stacked[..., np.arange(SLOTS) != slot, :, :] = 0
    return state.replace(grad_sum=gradient)


def numpy_adamw(w, gradients, inputs: AdamWInputs):
    """The algorithm as torch documents it, in float64: decoupled decay, then the bias-corrected update."""
    beta1, beta2 = float(np.float32(inputs.beta1)), float(np.float32(inputs.beta2))
    mu, nu = np.zeros_like(w), np.zeros_like(w)
    for step, gradient in enumerate(gradients, start=1):
        w = w - inputs.learning_rate * inputs.weight_decay * w
        mu = beta1 * mu + (1 - beta1) * gradient
        nu = beta2 * nu + (1 - beta2) * gradient**2
        mu_hat, nu_hat = mu / (1 - beta1**step), nu / (1 - beta2**step)
        w = w - inputs.learning_rate * mu_hat / (np.sqrt(nu_hat) + inputs.eps)
    return w


def global_norm(tree) -> float:
    return float(np.sqrt(sum(np.sum(np.square(leaf.astype(np.float64))) for leaf in jax.tree.leaves(tree))))


def assert_same(actual, expected):
    for before, after in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        assert np.array_equal(before, after)


def everything_in(state: TrainState, slot: int):
    trees = [slot_of(tree, slot) for tree in (state.w, state.mu, state.nu, state.grad_sum)]
    return [*trees, state.step[slot], state.scale[slot]]


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"learning_rate": 0.1},
        {"beta1": 0.5, "beta2": 0.999},
        {"eps": 0.03},
        {"weight_decay": 0.3, "learning_rate": 0.05},
        {"grad_clip_norm": 2.0, "eps": 0.01},
        {"grad_clip_norm": 1e6},
    ],
    ids=str,
)
def test_five_steps_equal_adamw(engine, changed):
    inputs = replace(DEFAULTS, **changed)
    state, gradients = fresh_state(), []
    for seed in range(5):
        state = with_gradient(state, seed=10 + seed)
        gradient = slot_of(state.grad_sum, SLOT)
        norm = global_norm(gradient)
        factor = inputs.grad_clip_norm / norm if 0 < inputs.grad_clip_norm < norm else 1.0
        gradients.append(jax.tree.map(lambda leaf, by=factor: leaf.astype(np.float64) * by, gradient))
        state, reported, applied = engine.optim_step(state, SLOT, inputs)
        assert applied
        assert reported == pytest.approx(norm, rel=1e-5)  # before clipping
        assert state.step[SLOT] == seed + 1
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(state.grad_sum))
    start = slot_of(fresh_state().w, SLOT)
    expected = jax.tree.map(
        lambda w, *steps: numpy_adamw(w.astype(np.float64), steps, inputs), start, *gradients
    )
    moved = jax.tree.map(lambda after, before: after - before, slot_of(state.w, SLOT), start)
    for (name, actual), wanted, before in zip(
        named_factors(moved).items(), jax.tree.leaves(expected), jax.tree.leaves(start), strict=True
    ):
        np.testing.assert_allclose(
            actual, wanted - before, rtol=0, atol=1e-4 * np.abs(wanted - before).max(), err_msg=name
        )


def test_no_bit_of_another_slot_changes(engine):
    inputs = replace(DEFAULTS, learning_rate=1.0, weight_decay=1.0, grad_clip_norm=0.5)
    before = used_state()
    after, _, applied = engine.optim_step(before, SLOT, inputs)
    assert applied
    for slot in range(SLOTS):
        if slot != SLOT:
            assert_same(everything_in(after, slot), everything_in(before, slot))


def test_a_step_without_gradient_is_still_a_step(engine):
    before = with_gradient(used_state(), seed=0, slot=SLOT)
    zeros = jax.tree.map(np.zeros_like, before.w)
    after, norm, applied = engine.optim_step(before.replace(grad_sum=zeros), SLOT, DEFAULTS)
    assert (norm, applied, after.step[SLOT]) == (0.0, True, before.step[SLOT] + 1)
    for mu_after, mu_before in zip(jax.tree.leaves(after.mu), jax.tree.leaves(before.mu), strict=True):
        expected = np.float32(0.9) * mu_before[..., SLOT, :, :]
        np.testing.assert_allclose(mu_after[..., SLOT, :, :], expected, rtol=1e-6)


@pytest.mark.parametrize("eps", [1e-12, 0.0])
def test_a_step_on_a_fresh_adapter_without_gradient_moves_nothing(eps):
    before = fresh_state()
    after, norm, applied = tiny_engine().optim_step(before, SLOT, replace(DEFAULTS, eps=eps))
    assert (norm, applied) == (0.0, True)
    assert_same(after.w, before.w)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("grad_clip_norm", [0.0, 1.0])
def test_a_gradient_that_is_not_finite_is_dropped_and_changes_nothing(engine, value, grad_clip_norm):
    before = used_state()
    before.grad_sum.head.b[SLOT, 3, 5] = value
    inputs = replace(DEFAULTS, grad_clip_norm=grad_clip_norm, weight_decay=0.5)
    after, norm, applied = engine.optim_step(before, SLOT, inputs)
    assert not applied
    assert not np.isfinite(norm)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(slot_of(after.grad_sum, SLOT)))
    for name in ("w", "mu", "nu"):
        assert_same(getattr(after, name), getattr(before, name))
    assert np.array_equal(after.step, before.step)
    for slot in range(SLOTS):
        if slot != SLOT:
            assert_same(everything_in(after, slot), everything_in(before, slot))


@pytest.mark.parametrize(
    "changed", [{"learning_rate": 3e38, "weight_decay": 10.0}, {"learning_rate": np.inf}], ids=str
)
def test_a_step_whose_weights_would_overflow_is_not_applied(engine, changed):
    before = used_state()
    after, norm, applied = engine.optim_step(before, SLOT, replace(DEFAULTS, **changed))
    assert np.isfinite(norm)
    assert not applied
    for name in ("w", "mu", "nu"):
        assert_same(getattr(after, name), getattr(before, name))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(slot_of(after.grad_sum, SLOT)))


def test_a_step_that_was_not_applied_leaves_the_next_one_as_if_it_had_not_been():
    engine = tiny_engine()
    spoilt, _, _ = engine.optim_step(
        with_gradient(used_state(), seed=10), SLOT, replace(DEFAULTS, learning_rate=np.inf)
    )
    with_detour, _, applied = engine.optim_step(with_gradient(spoilt, seed=11), SLOT, DEFAULTS)
    direct, _, _ = engine.optim_step(with_gradient(used_state(), seed=11), SLOT, DEFAULTS)
    assert applied
    assert_same(with_detour.w, direct.w)


@pytest.mark.parametrize("shape", [(1, 1, 1), pytest.param((2, 1, 4), marks=pytest.mark.slow)], ids=mesh_name)
def test_untrained_groups_and_rank_padding_stay_zero(shape):
    """A rank-4 adapter that trains its MLP only, as created: B zero, A zero where nothing is trained."""
    engine = tiny_engine(shape)
    rank, w = 4, random_adapters(seed=1)
    for name, factors in [*w.layers.items(), ("head", w.head)]:
        factors.a[..., rank if name in ("gate", "up", "down") else 0 :, :] = 0
        factors.b[...] = 0
    state = fresh_state(w)
    for step in range(3):
        rows = deal(engine.data_shards, [[(random_datum(step, SLOT),)]])
        state = state.replace(grad_sum=engine.forward_backward(state.w, rows).grad_sum)
        inputs = replace(DEFAULTS, weight_decay=0.1, grad_clip_norm=1.0, learning_rate=0.01)
        state, _, applied = engine.optim_step(state, SLOT, inputs)
        assert applied
    for name, factors in [*state.w.layers.items(), ("head", state.w.head)]:
        for factor in (factors.a, factors.b):
            trained, untrained = np.split(
                factor[..., SLOT, :, :], [rank if name in ("gate", "up", "down") else 0], axis=-2
            )
            assert not np.any(untrained), name
            assert trained.size == 0 or np.all(np.any(trained, axis=-1)), name
    assert rank < RANK
