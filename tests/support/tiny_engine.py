"""A tiny random model, rows for it, and its training steps compiled once per mesh, for the engine's tests.

Every batch is [ROWS, LENGTH], so that each step is compiled for one shape only.
"""

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils

import spmd_tx.worker.memory.steps  # noqa: F401 - it has read HEAD_TOKENS before that is changed here
from spmd_tx.demo.tiny_model import Spec, model_config
from spmd_tx.models.adapters.lora import Adapters
from spmd_tx.models.base_weights import weights
from spmd_tx.models.declared.model import Model
from spmd_tx.models.families.registry import declare
from spmd_tx.protocol.commands import LOSS_NAMES
from spmd_tx.protocol.kernels import Kernels
from spmd_tx.sharding.mesh import make_mesh
from spmd_tx.sharding.transfer import rows_to_devices, to_devices
from spmd_tx.sharding.weight import shardings
from spmd_tx.worker.steps import train
from spmd_tx.worker.steps.adamw import ADAMW, AdamWInputs
from spmd_tx.worker.steps.dimuon import DIMUON, DimuonInputs
from spmd_tx.worker.steps.losses import TokenLossInputs
from spmd_tx.worker.steps.optimizer import make_optim_step
from spmd_tx.worker.steps.train import Rows
from spmd_tx.worker.steps.train_state import TrainState, train_weights
from tests.support.model_shapes import TINY, resized

MODEL = resized(TINY, vocab_size=256, n_heads=8)
MIXTURE = resized(
    MODEL,
    architecture="Qwen3MoeForCausalLM",
    d_ff=32,
    n_experts=8,
    experts_per_token=2,
    normalize_expert_weights=True,
)
GROUPED = resized(MIXTURE, d_ff=128, n_experts=32)  # large enough for tokens to be grouped by expert
MODELS = {
    "dense": MODEL,
    "mixture": MIXTURE,
    "grouped": GROUPED,
    **{  # with linear attention, and with latent attention and experts
        kind: declare(model_config(Spec(family=family, vocab_size=256), {}))
        for kind, family in (("linear", "qwen3_5"), ("latent", "glm4_moe_lite"))
    },
}
SLOTS, RANK, ROWS, LENGTH = 4, 8, 8, 64
train.HEAD_TOKENS = 128  # the head works in chunks of tokens; with small ones every batch has several
SCALES = np.array([2.0, 1.0, 0.5, 2.0], np.float32)
BOTH_SCALES = np.stack([SCALES, 0.7 * SCALES], axis=1).astype(np.float32)  # of linear maps and of experts


ENGINES = [  # mesh, kind of model, whether base weights are split over fsdp
    ((1, 1, 1), "dense", False),
    ((2, 2, 2), "mixture", True),
    ((2, 2, 2), "grouped", True),
    *(  # of whose axes those above have each one, or several
        pytest.param(engine, marks=pytest.mark.slow)
        for engine in [
            ((1, 1, 1), "mixture", False),
            ((2, 2, 2), "dense", True),
            ((1, 1, 1), "grouped", False),
            ((1, 1, 8), "dense", False),
            ((2, 2, 2), "dense", False),
            ((1, 8, 1), "mixture", False),
            ((2, 2, 2), "mixture", False),
            ((8, 1, 1), "dense", False),
            ((2, 1, 4), "dense", False),
            ((8, 1, 1), "dense", True),
            ((1, 4, 2), "mixture", False),
            ((8, 1, 1), "mixture", True),
        ]
    ),
]


def mesh_name(shape: tuple[int, int, int]) -> str:
    return "fsdp{}-ep{}-tp{}".format(*shape)


def engine_name(engine: tuple[tuple[int, int, int], str, bool]) -> str:
    shape, kind, split_base = engine
    return f"{kind}-{mesh_name(shape)}" + ("-split" if split_base else "")


def random_arrays(declared: Any, seed: int, std: float = 0.1) -> Any:
    """NumPy arrays for a tree of Weights; norms lie around 1. A leaf does not depend on the other leaves."""

    def leaf(path: Any, weight: Any) -> np.ndarray:
        noise = np.random.default_rng([seed, zlib.crc32(jax.tree_util.keystr(path).encode())])
        values = std * noise.standard_normal(weight.shape)
        return (values + ("norm" in weight.hf_name)).astype(weight.dtype)

    return jax.tree_util.tree_map_with_path(leaf, declared)


def to_numpy(tree: Any) -> Any:
    """Whole arrays, on every process."""

    def whole(x: Any) -> np.ndarray:
        if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
            return np.asarray(x)
        return np.asarray(multihost_utils.process_allgather(x, tiled=True))

    return jax.tree.map(whole, tree)


def slot_of(stack: Any, slot: int) -> Any:
    """One slot of a tree of stacked NumPy leaves [..., S, R, X]."""
    return jax.tree.map(lambda x: x[..., slot, :, :], stack)


def named_factors(adapters: Any) -> dict[str, np.ndarray]:
    """The leaves of an Adapters tree by a name that a failing test can print."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(adapters)}


def random_adapters(seed: int, model: Model = MODEL) -> Adapters[Any]:
    """SLOTS different adapters with both factors non-zero, as NumPy arrays."""
    return random_arrays(train_weights(model, make_mesh(1, 1, 1), SLOTS, RANK).w, seed)


@dataclass(frozen=True)
class Datum:
    """One sequence of one adapter, and its loss."""

    slot: int
    tokens: np.ndarray
    targets: np.ndarray  # [N], or [N, K]
    weights: np.ndarray  # the same
    advantages: np.ndarray
    sampling_logprobs: np.ndarray
    loss: str = "cross_entropy"
    clip: tuple[float, float] = (0.8, 1.2)
    beta: float = 0.05
    kl_coeff: float = 0.0
    ratio_mask: np.ndarray | None = None  # of gspo

    def times(self, factor: float) -> "Datum":
        return replace(self, weights=self.weights * np.float32(factor))


def random_datum(seed: int, slot: int, length: int = LENGTH, loss: str = "cross_entropy") -> Datum:
    random = np.random.default_rng(seed)
    tokens = random.integers(0, MODEL.vocab_size, length + 1, dtype=np.int32)
    weights, advantages = random.normal(size=(2, length)).astype(np.float32)
    logprobs = random.normal(-5.5, 0.5, length).astype(np.float32)
    return Datum(slot, tokens[:-1], tokens[1:], weights, advantages, logprobs, loss)


def several_targets(datum: Datum, count: int, seed: int) -> Datum:
    """The datum with so many targets per position; some of them do not count."""
    random = np.random.default_rng(seed)
    shape = (len(datum.tokens), count)
    weights = random.normal(size=shape).astype(np.float32) * (random.random(shape) < 0.7)
    return replace(
        datum, targets=random.integers(0, MODEL.vocab_size, shape, dtype=np.int32), weights=weights
    )


Row = Sequence[Datum]  # of one adapter and one loss; empty: a free row


def pack(rows: Sequence[Row]) -> tuple[Rows, TokenLossInputs]:
    """Rows as the coordinator packs them, padded to ROWS."""
    like = next((datum for row in rows for datum in row), None)
    integers = {name: np.zeros((ROWS, LENGTH), np.int32) for name in ("tokens", "segments", "positions")}
    several = () if like is None else like.targets.shape[1:]
    integers["targets"] = np.zeros((ROWS, LENGTH, *several), np.int32)
    floats = {name: np.zeros((ROWS, LENGTH), np.float32) for name in ("advantages", "sampling_logprobs")}
    floats["weights"] = np.zeros(integers["targets"].shape, np.float32)
    if like is not None and like.ratio_mask is not None:
        floats["ratio_mask"] = np.zeros((ROWS, LENGTH), np.float32)
    slots, kinds = np.zeros(ROWS, np.int32), np.zeros((ROWS, 1), np.int32)
    low, high = np.zeros((2, ROWS, LENGTH), np.float32)
    beta, kl_coeff = np.zeros((2, ROWS, 1), np.float32)
    for index, row in enumerate(rows):
        start = 0
        for number, datum in enumerate(row, start=1):
            place = index, slice(start, start + len(datum.tokens))
            integers["segments"][place] = number
            integers["positions"][place] = np.arange(len(datum.tokens))
            for name in ("tokens", "targets"):
                integers[name][place] = getattr(datum, name)
            for name, array in floats.items():
                array[place] = getattr(datum, name)
            slots[index], kinds[index] = datum.slot, LOSS_NAMES.index(datum.loss)
            low[place], high[place] = datum.clip
            beta[index], kl_coeff[index] = datum.beta, datum.kl_coeff
            start += len(datum.tokens)
    loss = TokenLossInputs(kinds=kinds, clip_low=low, clip_high=high, beta=beta, kl_coeff=kl_coeff, **floats)
    return Rows(**integers, slots=slots), loss


def deal(data_shards: int, requests: Sequence[Sequence[Row]]) -> list[Row]:
    """Requests in one batch: row i of each goes to data shard i % n, in order within the shard."""
    shards: list[list[Row]] = [[] for _ in range(data_shards)]
    for request in requests:
        for index, row in enumerate(request):
            shards[index % data_shards].append(row)
    places = ROWS // data_shards
    assert max(map(len, shards)) <= places, "the requests do not fit"
    return [row for shard in shards for row in (*shard, *[()] * (places - len(shard)))]


@dataclass(frozen=True)
class Gradient:
    """What one forward_backward returns, as NumPy arrays."""

    grad_sum: Any
    logprobs: np.ndarray
    losses: np.ndarray


class TinyEngine:
    """The random model on one mesh. The seed of its weights is fixed: meshes hold the same numbers."""

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: Any,
        kind: str,
        split_base: bool,
        remat: str,
        kernels: Kernels = Kernels(),
    ) -> None:
        self.mesh, self.data_shards = make_mesh(*shape), shape[0] * shape[1]
        self.kind, self.model = kind, MODELS[kind]
        self.declared_base = weights(self.model, self.mesh, dtype, split_over_fsdp=split_base)
        self.declared_train = train_weights(self.model, self.mesh, SLOTS, RANK)
        self.base = self.place(random_arrays(self.declared_base, seed=0), self.declared_base)
        declared = (self.model, self.mesh, self.declared_base, self.declared_train)
        self._forward = train.make_forward(*declared, kernels=kernels)
        self._forward_backward = train.make_forward_backward(*declared, remat, kernels=kernels)
        self._optim_steps = {
            inputs: make_optim_step(self.model, self.mesh, self.declared_train, optimizer)
            for inputs, optimizer in ((AdamWInputs, ADAMW), (DimuonInputs, DIMUON))
        }

    def batch(self, rows: Sequence[Row], experts: np.ndarray | None = None) -> Any:
        """Packed and placed. ``experts`` are to be replayed; without, the router chooses them all."""
        packed, loss = pack(rows)
        if self.model.n_experts and experts is None:
            experts = np.full((ROWS, LENGTH, self.model.n_layers, self.model.experts_per_token), -1, np.int16)
        return rows_to_devices(self.mesh, (replace(packed, experts=experts), loss))

    def place(self, arrays: Any, declared: Any) -> Any:
        return jax.tree.map(to_devices, arrays, shardings(self.mesh, declared))

    def place_adapters(self, arrays: Any) -> Any:
        return self.place(arrays, self.declared_train.w)

    def forward(
        self, w: Any, rows: Sequence[Row], experts: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """(logprobs, losses)"""
        batch = self.batch(rows, experts)
        return to_numpy(self._forward(self.base, self.place_adapters(w), BOTH_SCALES, *batch))

    def forward_backward(
        self, w: Any, rows: Sequence[Row], grad_sum: Any = None, experts: np.ndarray | None = None
    ) -> Gradient:
        batch = self.batch(rows, experts)
        grad_sum = jax.tree.map(np.zeros_like, w) if grad_sum is None else grad_sum
        w, grad_sum = self.place_adapters(w), self.place_adapters(grad_sum)
        return Gradient(*to_numpy(self._forward_backward(self.base, w, grad_sum, BOTH_SCALES, *batch)))

    def temporary_bytes(self, rows: Sequence[Row]) -> int:
        """What forward_backward needs per device besides its arguments and results."""
        return self.compiled(rows).memory_analysis().temp_size_in_bytes

    def compiled(self, rows: Sequence[Row]) -> Any:
        """forward_backward for a batch."""
        w = self.place_adapters(random_adapters(0, self.model))
        step: Any = self._forward_backward
        return step.lower(self.base, w, w, BOTH_SCALES, *self.batch(rows)).compile()

    def optim_step(
        self, state: TrainState, slot: int, inputs: AdamWInputs | DimuonInputs
    ) -> tuple[TrainState, float, bool]:
        """(state, gradient norm, applied); NumPy in and out."""
        placed = self.place(state, self.declared_train)
        step, inputs = self._optim_steps[type(inputs)], jax.tree.map(np.float32, inputs)
        after, metrics = step(placed, np.int32(slot), inputs)
        return to_numpy(after), float(metrics["grad_norm"]), bool(metrics["applied"])


def tiny_engine(
    shape: tuple[int, int, int] = (1, 1, 1),
    dtype: str = "float32",
    kind: str = "dense",
    split_base: bool = False,
    remat: str = "full",
) -> TinyEngine:
    """One of each for the whole test session: its steps stay compiled."""
    return _tiny_engine(shape, dtype, kind, split_base, remat, is_compiled_quickly())


def is_compiled_quickly() -> bool:
    """Steps that were compiled with all optimizations are others than those without (engine_setup.py)."""
    return jax.config.read("jax_disable_most_optimizations")


@functools.cache
def _tiny_engine(
    shape: tuple[int, int, int], dtype: str, kind: str, split_base: bool, remat: str, _: bool
) -> TinyEngine:
    return TinyEngine(
        shape, {"float32": jnp.float32, "bfloat16": jnp.bfloat16}[dtype], kind, split_base, remat
    )
