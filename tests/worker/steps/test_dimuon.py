"""Dimuon is what docs/training.md says, on every mesh: the sign of a preconditioned momentum."""

from typing import Any

import jax
import numpy as np
import pytest

from spmd_tx.models.adapters.lora import rank_in_experts
from spmd_tx.protocol.commands import DimuonStep
from spmd_tx.worker.steps.adamw import AdamWInputs
from spmd_tx.worker.steps.dimuon import dimuon_inputs
from spmd_tx.worker.steps.train_state import TrainState
from tests.support.tiny_engine import (
    BOTH_SCALES,
    MODELS,
    RANK,
    SLOTS,
    mesh_name,
    named_factors,
    random_adapters,
    slot_of,
    tiny_engine,
)

pytestmark = pytest.mark.usefixtures("quickly_compiled")

SLOT, STEPS = 1, 10
COMMAND = DimuonStep(slot=SLOT, rank=RANK, learning_rate=0.02, beta1=0.9, grad_clip_norm=0.0)
KIND = "mixture"  # with factors of each expert, and such as all experts share
MODEL = MODELS[KIND]


@pytest.fixture(
    scope="module",
    params=[(2, 2, 2), *(pytest.param(shape, marks=pytest.mark.slow) for shape in ((1, 1, 1), (2, 1, 2)))],
    ids=mesh_name,
)
def engine(request):
    return tiny_engine(request.param, kind=KIND, split_base=request.param[0] > 1)


def fresh_state(w=None) -> TrainState:
    w = random_adapters(seed=1, model=MODEL) if w is None else w
    zeros = jax.tree.map(np.zeros_like, w)
    return TrainState(w, zeros, zeros, zeros, np.zeros(SLOTS, np.int32), BOTH_SCALES)


def with_gradient(state: TrainState, seed: int, slot: int = SLOT) -> TrainState:
    """A random gradient in one slot; its rows and columns have sizes of their own."""
    gradient = random_adapters(seed, MODEL)
    for stacked in jax.tree.leaves(gradient):
        random = np.random.default_rng(seed)
        stacked *= np.exp(random.normal(size=stacked.shape[-1]))
        stacked[..., np.arange(SLOTS) != slot, :, :] = 0
    return state.replace(grad_sum=gradient)


def numpy_direction(momentum: np.ndarray, rank: int) -> np.ndarray:
    """One matrix [R, W] in float64. The iteration runs on the matrix itself, as Jordan et al. publish it."""
    square = (momentum / np.sqrt(np.mean(momentum[:rank] ** 2))) ** 2
    rows, columns = square.mean(1, keepdims=True), square.sum(0, keepdims=True) / rank
    x = momentum / np.sqrt((rows + 1e-4) * (columns + 1e-4))
    x = x / np.linalg.norm(x)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x * np.sqrt(rank) / np.linalg.norm(x)


def numpy_dimuon(w: np.ndarray, gradients: list[np.ndarray], rank: int, command: DimuonStep) -> np.ndarray:
    rate, momentum = command.learning_rate * (command.rank / 32) ** 0.175, np.zeros_like(w)
    for gradient in gradients:
        momentum = command.beta1 * momentum + (1 - command.beta1) * gradient
        matrices = momentum.reshape(-1, *momentum.shape[-2:])
        w = w - rate * np.stack([numpy_direction(m, rank) for m in matrices]).reshape(w.shape)
    return w


def moved(engine: Any, command: DimuonStep) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """How far ten steps move each factor: as the program does it, and as NumPy does."""
    state, gradients = fresh_state(), []
    start = slot_of(state.w, SLOT)
    for seed in range(STEPS):
        state = with_gradient(state, seed=10 + seed)
        gradient = slot_of(state.grad_sum, SLOT)
        norm = np.sqrt(sum(np.sum(np.square(leaf.astype(np.float64))) for leaf in jax.tree.leaves(gradient)))
        factor = command.grad_clip_norm / norm if 0 < command.grad_clip_norm < norm else 1.0
        gradients.append(jax.tree.map(lambda leaf, by=factor: leaf.astype(np.float64) * by, gradient))
        state, reported, applied = engine.optim_step(state, SLOT, dimuon_inputs(MODEL, command))
        assert applied
        assert reported == pytest.approx(norm, rel=1e-5)
    assert state.step[SLOT] == STEPS
    assert not any(np.any(leaf) for leaf in jax.tree.leaves((state.grad_sum, state.nu)))
    actual = jax.tree.map(lambda after, before: after - before, slot_of(state.w, SLOT), start)

    def expected(path: Any, before: np.ndarray, *steps: np.ndarray) -> np.ndarray:
        is_of_experts = before.shape[-2] != RANK
        rank = rank_in_experts(MODEL, command.rank) if is_of_experts else command.rank
        return numpy_dimuon(before.astype(np.float64), list(steps), rank, command) - before

    return named_factors(actual), named_factors(jax.tree_util.tree_map_with_path(expected, start, *gradients))


@pytest.mark.parametrize("changed", [{}, {"beta1": 0.5, "grad_clip_norm": 3.0}], ids=str)
def test_ten_steps_equal_the_reference(engine, changed):
    command = DimuonStep(**{name: getattr(COMMAND, name) for name in COMMAND.__struct_fields__} | changed)
    actual, expected = moved(engine, command)
    for name, wanted in expected.items():
        atol = 1e-3 * np.abs(wanted).max()
        np.testing.assert_allclose(actual[name], wanted, rtol=0, atol=atol, err_msg=name)


def test_a_step_has_the_same_bits_beside_an_adapter_of_adamw(engine):
    """Neither optimizer's steps change a bit of the other's adapter, whichever comes first."""
    other = SLOT - 1
    inputs = {SLOT: dimuon_inputs(MODEL, COMMAND), other: AdamWInputs(0.01, 0.9, 0.95, 1e-12, 0.1, 1.0)}

    def trained(*slots: int) -> TrainState:
        state = fresh_state()
        for turn in range(2):
            for slot in slots:
                gradient = with_gradient(state, seed=10 + turn, slot=slot).grad_sum
                state = state.replace(grad_sum=jax.tree.map(np.add, state.grad_sum, gradient))
            for slot in slots if turn else slots[::-1]:
                state, _, applied = engine.optim_step(state, slot, inputs[slot])
                assert applied
        return state

    together = trained(SLOT, other)
    for slot in (SLOT, other):
        alone = trained(slot)
        for kept in ("w", "mu", "nu"):
            actual, expected = (named_factors(slot_of(getattr(of, kept), slot)) for of in (together, alone))
            for name, values in expected.items():
                assert np.array_equal(actual[name], values), (kept, name)
