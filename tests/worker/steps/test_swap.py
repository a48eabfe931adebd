"""What leaves a slot comes back bit for bit, into any slot, in the middle of anything."""

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd_tx.models.adapters.lora import adapter_weights
from spmd_tx.sharding.mesh import make_mesh
from spmd_tx.sharding.transfer import to_devices
from spmd_tx.sharding.weight import Weight, shardings
from spmd_tx.worker.idle_adapters import IdleAdapters, place_of
from spmd_tx.worker.steps import swap
from spmd_tx.worker.steps.adamw import AdamWInputs
from spmd_tx.worker.steps.sample import Bank
from spmd_tx.worker.steps.train_state import TrainState, train_weights
from tests.support.tiny_engine import (
    MODELS,
    RANK,
    SLOTS,
    TinyEngine,
    deal,
    mesh_name,
    random_arrays,
    random_datum,
    tiny_engine,
    to_numpy,
)

pytestmark = pytest.mark.usefixtures("quickly_compiled")

FROM, TO = 0, 3  # slots; of the tiny engine's, these have the same scale
BEYOND_HOST = 0  # bytes


Between = Callable[[TrainState, int, "Swapper"], tuple[TrainState, int]]


@functools.cache
def swap_steps(shape: tuple[int, int, int], kind: str) -> tuple[TrainState, Any]:
    """What is declared of a training state, and its steps: compiled once for all tests."""
    mesh = make_mesh(*shape)
    declared = train_weights(MODELS[kind], mesh, SLOTS, RANK)
    return declared, swap.make_swap_steps(mesh, declared)


@functools.cache
def page_steps(shape: tuple[int, int, int], kind: str, dtype: str) -> tuple[Bank, Any, Any]:
    """The same of a bank: the steps out of it, and into it."""
    mesh = make_mesh(*shape)
    adapters = adapter_weights(MODELS[kind], mesh, SLOTS, RANK, jnp.dtype(dtype), zero=False)
    declared = Bank(adapters, Weight((SLOTS, 2), P(), jnp.float32))
    return declared, swap.make_swap_steps(mesh, adapters).out, swap.make_page_in(mesh, declared)


class Swapper:
    """A random training state of one mesh, and the way out of it and back."""

    def __init__(self, shape, kind: str, directory: Path, budget: int) -> None:
        self.mesh = make_mesh(*shape)
        self.declared, self.steps = swap_steps(shape, kind)
        self.idle = IdleAdapters(directory, budget)

    def place(self, arrays: TrainState) -> TrainState:
        return jax.tree.map(to_devices, arrays, shardings(self.mesh, self.declared))

    def out(self, state: TrainState, slot: int, model: str) -> None:
        self.idle.put(model, self.steps.out(state, np.int32(slot)))

    def back(self, state: TrainState, slot: int, model: str) -> tuple[TrainState, bool]:
        vector, is_from_disk = self.idle.take(model)
        return self.steps.back(state, vector, np.int32(slot)), is_from_disk


def every_bit_used(declared: Any, seed: int) -> Any:
    """Numbers of all kinds: -0, subnormal ones, large integers, and NaN with a payload.

    Of 16 bits there are only finite ones: CPUs compute in 32 bits, and lose the payload of NaN.
    """
    arrays = random_arrays(declared, seed, std=1.0)

    def spoil(leaf: np.ndarray) -> np.ndarray:
        bits = leaf.copy().view(f"u{leaf.dtype.itemsize}")
        most = np.iinfo(bits.dtype).max
        bits.flat[::7] = np.random.default_rng(seed).integers(
            most, size=bits.flat[::7].size, dtype=bits.dtype
        )
        if leaf.dtype == jnp.bfloat16:
            bits = np.where(bits & 0x7F80 == 0x7F80, leaf.view(np.uint16), bits)
        return bits.view(leaf.dtype)

    return jax.tree.map(spoil, arrays)


def moved(before: Any, after: Any, source: int, target: int) -> Any:
    """``before`` with one slot of ``after``."""

    def leaf(stack: np.ndarray, other: np.ndarray) -> np.ndarray:
        axis, stack = max(0, stack.ndim - 3), stack.copy()
        place = (slice(None),) * axis
        stack[*place, target] = other[*place, source]
        return stack

    return jax.tree.map(leaf, before, after)


def assert_same_bits(actual: Any, expected: Any) -> None:
    for here, there in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert here.tobytes() == there.tobytes()


@pytest.mark.parametrize(
    "shape, kind",
    [((1, 1, 1), "dense"), ((2, 1, 4), "dense"), ((2, 2, 2), "mixture")],
    ids=lambda value: value if isinstance(value, str) else mesh_name(value),
)
def test_a_swapped_slot_comes_back_bit_for_bit_from_host_and_disk(shape, kind, tmp_path):
    on_host, on_disk = Swapper(shape, kind, tmp_path / "a", 2**30), Swapper(shape, kind, tmp_path / "b", 0)
    arrays, others = (every_bit_used(on_host.declared, seed) for seed in (1, 2))
    for swapper in (on_host, on_disk):
        swapper.out(swapper.place(arrays), FROM, "ours")
        swapper.idle.settle()
        state, is_from_disk = swapper.back(swapper.place(others), TO, "ours")
        assert is_from_disk == (swapper is on_disk)
        assert_same_bits(to_numpy(state), moved(others, arrays, FROM, TO))
        assert swapper.idle.host_bytes == swapper.idle.disk_bytes == 0


@pytest.mark.parametrize("budget", [2**30, BEYOND_HOST], ids=["host", "disk"])
@pytest.mark.parametrize(
    "shape, kind, dtype",
    [
        ((1, 1, 1), "dense", "bfloat16"),
        ((2, 1, 4), "dense", "bfloat16"),
        ((2, 2, 2), "mixture", "bfloat16"),
        ((2, 1, 4), "dense", "float32"),
    ],
)
def test_a_version_comes_back_into_the_bank_bit_for_bit(shape, kind, dtype, budget, tmp_path):
    mesh = make_mesh(*shape)
    declared, page_out, page_in = page_steps(shape, kind, dtype)
    idle = IdleAdapters(tmp_path / "idle", budget)
    arrays, others = (every_bit_used(declared, seed) for seed in (1, 2))

    def place(bank: Bank) -> Bank:
        return jax.tree.map(to_devices, bank, shardings(mesh, declared))

    idle.put("version", page_out(place(arrays).w, np.int32(FROM)))
    idle.settle()
    vector, is_from_disk = idle.take("version")
    assert is_from_disk == (budget == BEYOND_HOST)
    assert idle.host_bytes == idle.disk_bytes == 0
    after = to_numpy(page_in(place(others), vector, np.int32(TO), arrays.scale[FROM]))
    assert_same_bits(after, moved(others, arrays, FROM, TO))


@pytest.mark.parametrize("shape", [(1, 1, 1), (8, 1, 1), (2, 1, 4), (1, 1, 8)], ids=mesh_name)
def test_no_device_moves_what_another_one_moves(shape):
    mesh = make_mesh(*shape)
    declared = train_weights(MODELS["dense"], mesh, SLOTS, RANK)
    words = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(declared)) // SLOTS
    assert 0 <= swap.vector(declared, mesh).shape[0] - words < 4 * mesh.size


def test_what_was_left_for_longest_goes_to_disk_and_is_forgotten_with_its_file(tmp_path):
    swapper = Swapper((1, 1, 1), "dense", tmp_path / "idle", 0)
    size = 4 * swap.vector(swapper.declared, swapper.mesh).shape[0]
    swapper.idle = IdleAdapters(tmp_path / "idle", 2 * size)
    state = swapper.place(every_bit_used(swapper.declared, 1))
    for slot in range(SLOTS):
        swapper.out(state, slot, f"model {slot}")
    swapper.idle.settle()
    assert (swapper.idle.host_bytes, swapper.idle.disk_bytes) == (2 * size, 2 * size)
    assert [swapper.back(state, 0, "model 3")[1] for state in [swapper.place(to_numpy(state))]] == [False]
    swapper.idle.drop(["model 0", "model 2"])
    swapper.idle.settle()
    assert (swapper.idle.host_bytes, swapper.idle.disk_bytes) == (0, size)
    assert [path.stat().st_size for path in (tmp_path / "idle").iterdir()] == [size]


def test_without_a_disk_idle_adapters_stay_in_memory(tmp_path, caplog):
    (tmp_path / "file").touch()
    swapper = Swapper((1, 1, 1), "dense", tmp_path / "file" / "below", 0)
    arrays = every_bit_used(swapper.declared, 1)
    for _ in range(2):
        swapper.out(swapper.place(arrays), FROM, "ours")
        swapper.idle.settle()
    state, is_from_disk = swapper.back(swapper.place(arrays), TO, "ours")
    assert not is_from_disk
    assert_same_bits(to_numpy(state), moved(arrays, arrays, FROM, TO))
    assert "idle adapters stay in host memory" in caplog.text


def test_what_earlier_processes_left_is_removed(tmp_path):
    (tmp_path / "idle").mkdir()
    (tmp_path / "idle" / "0.bits").touch()
    IdleAdapters(tmp_path / "idle", 0)
    assert not (tmp_path / "idle").exists()


@pytest.mark.parametrize(
    "shape, kind, split_base",
    [
        ((1, 1, 1), "dense", False),
        ((2, 2, 2), "mixture", True),
        pytest.param((2, 1, 4), "dense", False, marks=pytest.mark.slow),
    ],
)
def test_a_model_that_moves_amid_its_gradients_learns_the_same_bits(shape, kind, split_base, tmp_path):
    engine = tiny_engine(shape, kind=kind, split_base=split_base)
    swapper = Swapper(shape, kind, tmp_path, BEYOND_HOST)
    stays = learn(engine, swapper, lambda state, slot, _: (state, slot))
    moves = learn(engine, swapper, move)
    assert_same_bits(one_slot(*moves), one_slot(*stays))


def move(state: TrainState, slot: int, swapper: Swapper) -> tuple[TrainState, int]:
    """Out, while another model is trained in the slot, and back into another one."""
    placed = swapper.place(state)
    swapper.out(placed, slot, "ours")
    swapper.idle.settle()
    others, target = swapper.place(every_bit_used(swapper.declared, 9)), TO if slot == FROM else FROM
    state, _ = swapper.back(others, target, "ours")
    return to_numpy(state), target


def learn(engine: TinyEngine, swapper: Swapper, between: Between) -> tuple[TrainState, int]:
    """Two steps of two gradients each; ``between`` any of them the model may move."""
    state, slot = random_arrays(swapper.declared, 4), FROM
    state = replace(state, nu=jax.tree.map(np.abs, state.nu), step=np.full(SLOTS, 5, np.int32))
    inputs = AdamWInputs(0.01, 0.9, 0.95, 1e-8, 0.01, 1.0)
    for step in range(2):
        for part in range(2):
            rows = [(random_datum(10 * step + part, slot),)]
            gradient = engine.forward_backward(state.w, deal(engine.data_shards, [rows]), state.grad_sum)
            state, slot = between(state.replace(grad_sum=gradient.grad_sum), slot, swapper)
        state, _, applied = engine.optim_step(state, slot, inputs)
        assert applied
        state, slot = between(state, slot, swapper)
    return state, slot


def one_slot(state: TrainState, slot: int) -> TrainState:
    def leaf(stack: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(np.moveaxis(stack, max(0, stack.ndim - 3), 0)[slot])

    return jax.tree.map(leaf, state)


def test_generations_have_folders_of_their_own_and_what_earlier_ones_left_goes(tmp_path):
    earlier = place_of(tmp_path, generation=9, process=1)
    earlier.mkdir(parents=True)
    later = place_of(tmp_path, generation=10, process=1)
    later.mkdir(parents=True)
    assert place_of(tmp_path, generation=10, process=0) != later
    assert [folder.name for folder in tmp_path.iterdir()] == [later.parent.name]
