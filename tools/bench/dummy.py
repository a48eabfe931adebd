"""Makes a model with random weights on one device, and arrays for its steps, without files."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from spmd_tx.models.adapters.lora import adapter_weights
from spmd_tx.models.attention.kv_cache import cache_weights
from spmd_tx.models.base_weights import weights
from spmd_tx.models.declared.model import Model
from spmd_tx.sharding.mesh import make_mesh
from spmd_tx.sharding.weight import Weight, shardings
from spmd_tx.worker.state import zeros
from spmd_tx.worker.steps.decode_rows import DecodeRows, RowState
from spmd_tx.worker.steps.losses import TokenLossInputs
from spmd_tx.worker.steps.sample import Bank
from spmd_tx.worker.steps.train import Rows
from spmd_tx.worker.steps.train_state import TrainState, train_weights

STD = 0.02
PAGE = 16  # tokens, as the server has it


def random_arrays(mesh: Mesh, declared: Any) -> Any:
    """Make an array for every declared weight on its device; norms are one."""
    keys = iter(jax.random.split(jax.random.key(0), 100))

    def leaf(weight: Weight) -> Array:
        def make(key: Array) -> Array:
            if "norm" in weight.hf_name:
                return jnp.ones(weight.shape, weight.dtype)
            return STD * jax.random.normal(key, weight.shape, weight.dtype)

        return jax.jit(make, out_shardings=shardings(mesh, weight))(next(keys))

    return jax.tree.map(leaf, declared)


@dataclass
class Dummy:
    """Holds the declarations, and the arrays that all steps share."""

    model: Model
    rank: int
    slots: int
    dtype: Any

    def __post_init__(self) -> None:
        self.mesh = make_mesh(1, 1, 1)
        self.declared_base = weights(self.model, self.mesh, self.dtype)
        self.declared_train = train_weights(self.model, self.mesh, self.slots, self.rank)
        adapters = adapter_weights(self.model, self.mesh, self.slots, self.rank, self.dtype, zero=False)
        scale = Weight((self.slots, 2), jax.P(), jnp.float32)
        self.declared_bank = Bank(adapters, scale)

    @cached_property
    def base(self) -> Any:
        return random_arrays(self.mesh, self.declared_base)

    def train_state(self) -> TrainState:
        """Return a state whose adapters are not zero."""
        fresh = zeros(self.mesh, self.declared_train)
        w = random_arrays(self.mesh, self.declared_train.w)
        return TrainState(w, fresh.grad_sum, fresh.mu, fresh.nu, fresh.step, jnp.ones_like(fresh.scale))

    def bank(self) -> Bank:
        return Bank(random_arrays(self.mesh, self.declared_bank.w), jnp.ones((self.slots, 2), jnp.float32))

    def declared_cache(self, rows: int, context: int) -> Any:
        """Declare pages for so many rows, and page 0."""
        pages = rows * context // PAGE + 1
        return cache_weights(self.model, self.mesh, pages, PAGE, self.dtype)

    def cache(self, declared: Any) -> Any:
        """Return zeros: making random numbers for most of a device's memory needs more than there is."""
        return zeros(self.mesh, declared)

    def batch(self, rows: int, length: int, segments: int = 1) -> tuple[Rows, TokenLossInputs]:
        """Return rows full of segments of equal length, with cross-entropy."""
        random, shape = np.random.default_rng(0), (rows, length)
        tokens = random.integers(0, self.model.vocab_size, shape, np.int32)
        place = np.broadcast_to(np.arange(length, dtype=np.int32), shape)
        each = length // segments
        slots = (np.arange(rows) % self.slots).astype(np.int32)
        packed = Rows(tokens, np.roll(tokens, -1, 1), place // each + 1, place % each, slots)
        per_row, per_token = np.zeros((rows, 1), np.float32), np.ones(shape, np.float32)
        kinds = np.zeros((rows, 1), np.int32)
        return packed, TokenLossInputs(
            kinds, per_token, per_token, per_row, per_row, per_token, per_token, per_token
        )

    def decode_rows(
        self, sequences: int, context: int, steps: int, read: int = 1
    ) -> tuple[RowState, np.ndarray, DecodeRows]:
        """Return ``read`` rows of each sequence, near its context's end, and tables of its own pages."""
        rows = sequences * read
        number = np.arange(rows, dtype=np.int32)
        pages = 1 + np.random.default_rng(0).permutation(sequences * context // PAGE).astype(np.int32)
        state = RowState(*(jnp.zeros(rows, jnp.int32) for _ in range(3)))
        return (
            state,
            pages.reshape(sequences, -1).repeat(read, axis=0),
            DecodeRows(
                source=np.full(rows, -1, np.int32),
                tokens=number % self.model.vocab_size,
                positions=np.full(rows, context - steps - 1, np.int32),
                remaining=np.full(rows, steps, np.int32),
                slots=np.zeros(rows, np.int32),
                seeds=np.stack([number, number], axis=1).astype(np.uint32),
                temperatures=np.ones(rows, np.float32),
                top_k=np.full(rows, -1, np.int32),
                top_p=np.ones(rows, np.float32),
                stop_tokens=np.full((rows, 8), -1, np.int32),
            ),
        )
