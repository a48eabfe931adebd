"""Adapters are created from their seed alone, and are copied without loss and without effect on others."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_tx.models.adapters.lora import adapter_weights
from spmd_tx.sharding.mesh import make_mesh
from spmd_tx.sharding.weight import Weight, shardings
from spmd_tx.worker.steps.adapters import make_adapter_steps
from spmd_tx.worker.steps.sample import Bank
from spmd_tx.worker.steps.train_state import TrainState, train_weights
from spmd_tx.worker.storage.checkpoints import SlotState
from tests.support.tiny_engine import (
    BOTH_SCALES,
    MIXTURE,
    MODEL,
    MODELS,
    SLOTS,
    named_factors,
    random_adapters,
    random_arrays,
    slot_of,
    to_numpy,
)

pytestmark = pytest.mark.usefixtures("quickly_compiled")

SEED = 2**40 + 5
ALL = (True, True, True)
PER_EXPERT = replace(MIXTURE, expert_lora="per-expert")
FOURS = np.full(2, 4, np.float32)


class Adapters:
    """The steps on one mesh, with a random state."""

    def __init__(self, shape=(1, 1, 1), max_rank=8, bank_dtype=jnp.float32, model=MODEL):
        self.mesh, self.model = make_mesh(*shape), model
        self.declared = train_weights(model, self.mesh, SLOTS, max_rank)
        bank = adapter_weights(model, self.mesh, SLOTS, max_rank, bank_dtype, zero=False)
        self.declared_bank = Bank(bank, Weight((SLOTS, 2), jax.P(), jnp.float32))
        self.steps = make_adapter_steps(model, self.mesh, self.declared, self.declared_bank)

    def state(self) -> TrainState:
        trees = [random_arrays(tree, seed) for seed, tree in enumerate([self.declared.w] * 4)]
        return self._place(TrainState(*trees, np.full(SLOTS, 7, np.int32), BOTH_SCALES), self.declared)

    def bank(self) -> Bank:
        return self._place(Bank(random_arrays(self.declared_bank.w, seed=9), BOTH_SCALES), self.declared_bank)

    def _place(self, arrays, declared):
        return jax.tree.map(jax.device_put, arrays, shardings(self.mesh, declared))

    def created(self, seed=SEED, slot=1, rank=4, groups=ALL) -> TrainState:
        halves = np.array([seed & 0xFFFFFFFF, seed >> 32], np.uint32)
        ranks = np.array([rank, self.model.adapted["up"].rank(rank)], np.int32)
        scales, groups = (32 / ranks).astype(np.float32), np.array(groups)
        return to_numpy(self.steps.create(self.state(), np.int32(slot), halves, ranks, scales, groups))


def adapters(shape=(1, 1, 1), max_rank=8, bank_dtype=jnp.float32, model=MODEL) -> Adapters:
    """One of each for all tests: its steps stay compiled."""
    return _adapters(shape, max_rank, bank_dtype, model)


_adapters = functools.cache(Adapters)


@pytest.fixture
def model(request):
    return MODELS[request.param]


def factors_of(state: TrainState, slot: int = 1) -> dict[str, np.ndarray]:
    return named_factors(slot_of(state.w, slot))


@functools.cache
def expected(model=MODEL):
    return factors_of(adapters(model=model).created())


SERVERS = [({}, 3), ({"max_rank": 16}, 1), ({"max_rank": 4}, 1), ({"shape": (2, 2, 2)}, 0)]
QUICK = [("dense", SERVERS[0]), ("dense", SERVERS[1]), ("mixture", SERVERS[0]), ("mixture", SERVERS[3])]


@pytest.mark.parametrize(
    "model, setup, slot",
    [
        pytest.param(kind, *each, marks=[] if (kind, each) in QUICK else [pytest.mark.slow])
        for kind in ("dense", "mixture", "grouped")
        for each in SERVERS
    ],
    indirect=["model"],
    ids=str,
)
def test_an_adapter_is_the_same_in_any_slot_on_any_server(model, setup, slot):
    for name, factor in factors_of(adapters(**setup, model=model).created(slot=slot), slot).items():
        rank = model.adapted[name.partition("['")[2].partition("'")[0] or "head"].rank(4)
        assert np.array_equal(factor[..., :rank, :], expected(model)[name][..., :rank, :]), name
        assert not np.any(factor[..., rank:, :]), name


def test_every_expert_gets_numbers_and_its_share_of_the_rank():
    state = adapters(model=PER_EXPERT).created(rank=8)
    ups = slot_of(state.w, 1).layers["up"].a
    assert ups.shape[:3] == (MIXTURE.n_layers, MIXTURE.n_experts, 8 // MIXTURE.experts_per_token)
    rows = {tuple(row.tolist()) for row in ups.reshape(-1, ups.shape[-1])}
    assert len(rows) == ups.shape[0] * ups.shape[1] * ups.shape[2]
    assert state.scale[1].tolist() == [4.0, 8.0]


def test_experts_share_the_factor_that_touches_the_model_width():
    state = adapters(model=MIXTURE).created(rank=8)
    created = slot_of(state.w, 1).layers
    layers, experts = (MIXTURE.n_layers,), (MIXTURE.n_layers, MIXTURE.n_experts)
    assert [created[name].a.shape[:-2] for name in ("gate", "up", "down")] == [layers, layers, experts]
    assert [created[name].b.shape[:-2] for name in ("gate", "up", "down")] == [experts, experts, layers]
    assert created["down"].a.shape[-2] == 8
    rows = {tuple(row.tolist()) for row in created["down"].a.reshape(-1, MIXTURE.d_ff)}
    assert len(rows) == MIXTURE.n_layers * MIXTURE.n_experts * 8
    assert state.scale[1].tolist() == [4.0, 4.0]


@pytest.mark.parametrize("seed", [SEED + 1, SEED + 2**32, 5])
def test_another_seed_gives_another_adapter(seed):
    for name, factor in factors_of(adapters().created(seed=seed)).items():
        assert np.array_equal(factor, expected()[name]) == name.endswith(".b"), name


def test_a_is_uniform_in_the_bounds_that_peft_draws_from_and_b_is_zero():
    created = slot_of(adapters().created(rank=8).w, 1)
    for factors in [*created.layers.values(), created.head]:
        bound = factors.a.shape[-1] ** -0.5
        assert 0.98 * bound < np.abs(factors.a).max() <= bound
        assert abs(factors.a.mean()) < 0.1 * bound
        assert factors.a.std() == pytest.approx(bound / 3**0.5, rel=0.05)
        assert not np.any(factors.b)


def test_every_layer_and_linear_map_gets_numbers_of_its_own():
    created = slot_of(adapters().created().w, 1)
    first_rows = [tuple(a[0].tolist()) for name in "qkv" for a in created.layers[name].a]
    assert len(set(first_rows)) == len(first_rows)


@pytest.mark.parametrize("groups", [(True, False, False), (False, True, False), (False, False, True)])
def test_groups_that_are_not_trained_are_zero(groups):
    created = slot_of(adapters().created(groups=groups).w, 1)
    trained = dict(zip(("attn", "mlp", "unembed"), groups, strict=True))
    for name, factors in created.layers.items():
        assert np.any(factors.a) == trained[MODEL.adapted[name].group], name
    assert np.any(created.head.a) == trained["unembed"]


def test_creation_clears_its_slot_and_touches_no_other():
    before, after = to_numpy(adapters().state()), adapters().created(slot=2)
    for tree in (after.grad_sum, after.mu, after.nu):
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(slot_of(tree, 2)))
    assert (after.step[2], *after.scale[2]) == (0, 8.0, 8.0)
    for slot in (0, 1, 3):
        for name in ("w", "grad_sum", "mu", "nu"):
            old, new = (named_factors(slot_of(getattr(state, name), slot)) for state in (before, after))
            assert all(np.array_equal(new[key], old[key]) for key in old)
        assert (after.step[slot], *after.scale[slot]) == (before.step[slot], *before.scale[slot])


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 4)], ids=str)
def test_a_slot_that_is_read_and_written_elsewhere_is_the_same(shape):
    steps, state = adapters(shape).steps, adapters(shape).state()
    content = steps.read(state, np.int32(1))
    moved = to_numpy(steps.write(state, content, np.int32(3), np.array([0.25, 0.5], np.float32)))
    for name in ("w", "mu", "nu"):
        tree = getattr(moved, name)
        assert jax.tree.all(jax.tree.map(np.array_equal, slot_of(tree, 3), slot_of(tree, 1)))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(slot_of(moved.grad_sum, 3)))
    assert (moved.step[3], *moved.scale[3]) == (7, 0.25, 0.5)
    assert isinstance(content, SlotState)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 4)], ids=str)
def test_a_version_in_the_bank_is_a_copy(shape):
    steps, state = adapters(shape).steps, adapters(shape).state()
    trained = to_numpy(state.w)
    bank = steps.to_bank(adapters(shape).bank(), steps.weights_of(state.w, np.int32(1)), np.int32(2), FOURS)
    zeros = jax.tree.map(jnp.zeros_like, steps.read(state, np.int32(1)))
    steps.write(state, zeros, np.int32(1), FOURS)  # training goes on in the donated buffers
    others = to_numpy(adapters(shape).bank().w)
    for slot in range(SLOTS):
        wanted = slot_of(trained, 1) if slot == 2 else slot_of(others, slot)
        assert jax.tree.all(jax.tree.map(np.array_equal, slot_of(to_numpy(bank.w), slot), wanted))
    assert np.asarray(bank.scale)[:, 0].tolist() == [2.0, 1.0, 4.0, 2.0]


def test_finite_weights_stay_finite_in_the_bank():
    """An infinity would turn the rows of every tenant in a decode step into NaN."""
    steps = adapters(bank_dtype=jnp.bfloat16).steps
    largest = np.finfo(np.float32).max
    one = jax.tree.map(lambda leaf: np.full(leaf.shape, -largest), slot_of(random_adapters(seed=1), 1))
    bank = steps.to_bank(adapters(bank_dtype=jnp.bfloat16).bank(), one, np.int32(2), FOURS)
    for leaf in jax.tree.leaves(bank.w):
        assert np.all(np.isfinite(np.asarray(leaf, np.float32)))
