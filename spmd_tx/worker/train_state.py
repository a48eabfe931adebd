"""All that training changes: adapters, gradients and optimizer moments, one entry per slot.

Dimension key: S slot, R maximum rank, X input or output width.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from spmd_tx.models.config import ModelConfig
from spmd_tx.models.lora import Adapters, adapter_weights
from spmd_tx.sharding.mesh import AnyMesh
from spmd_tx.sharding.weight import Weight


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """fp32. Steps take it and return a new one. Leaves are arrays or their declarations."""

    w: Adapters[Any]
    grad_sum: Adapters[Any]  # since the last optim_step
    mu: Adapters[Any]
    nu: Adapters[Any]
    step: Any  # int32 [S]
    scale: Any  # float32 [S, 2]: alpha / rank, and the same with the rank of experts' factors

    def with_gradient(self, grad_sum: Adapters[Any]) -> "TrainState":
        return replace(self, grad_sum=grad_sum)


def train_weights(model: ModelConfig, mesh: AnyMesh, slots: int, rank: int) -> TrainState:
    """Declare the state of ``slots`` adapters."""
    adapters = adapter_weights(model, mesh, slots, rank, jnp.float32, zero=True)
    step, scale = Weight((slots,), P(), jnp.int32), Weight((slots, 2), P(), jnp.float32)
    return TrainState(adapters, adapters, adapters, adapters, step, scale)


def take_slot(stack: Any, slot: Array) -> Any:
    """One slot of a tree of stacked leaves [..., S, R, X], without the slot axis."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, slot, x.ndim - 3, keepdims=False), stack)


def put_slot(stack: Any, one: Any, slot: Array) -> Any:
    """The stack with one slot replaced."""
    return jax.tree.map(
        lambda x, new: lax.dynamic_update_index_in_dim(x, new.astype(x.dtype), slot, x.ndim - 3), stack, one
    )
