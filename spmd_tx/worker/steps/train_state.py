"""The state that training changes: adapters, gradients and optimizer moments, one entry per slot.

Dimension key: S slot, R maximum rank, X input or output width.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from spmd_tx.models.adapters.lora import Adapters, adapter_weights
from spmd_tx.models.declared.model import Model
from spmd_tx.sharding.collectives import replicate_rows
from spmd_tx.sharding.mesh import AnyMesh
from spmd_tx.sharding.tree_node import TreeNode
from spmd_tx.sharding.weight import Weight


class TrainState(TreeNode):
    """Holds the state in fp32; steps take it and return a new one. Leaves are arrays or declarations."""

    w: Adapters[Any]
    grad_sum: Adapters[Any]  # since the last optim_step
    mu: Adapters[Any]
    nu: Adapters[Any]
    step: Any  # int32 [S]
    scale: Any  # float32 [S, 2]: alpha / rank, and the same with the rank of experts' factors


def train_weights(model: Model, mesh: AnyMesh, slots: int, rank: int) -> TrainState:
    """Declare the state of ``slots`` adapters."""
    adapters = adapter_weights(model, mesh, slots, rank, jnp.float32, zero=True)
    step, scale = Weight((slots,), P(), jnp.int32), Weight((slots, 2), P(), jnp.float32)
    return TrainState(adapters, adapters, adapters, adapters, step, scale)


def take_slot(stack: Any, slot: Array) -> Any:
    """Return one slot of a tree of stacked leaves [..., S, R, X], without the slot axis."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, slot, x.ndim - 3, keepdims=False), stack)


def active_slots(slots_B: Array, total: int) -> tuple[Array, Array]:
    """Return distinct slots [A] to differentiate, and each row's index among them.

    A depends on the shape of the micro-batch only, so that its contents do not change the program: it is the
    number of rows of all data shards, at most all slots. Slots without rows fill it up. ``slots_B`` are those
    of this data shard's rows.
    """
    everybodys = replicate_rows(slots_B)
    if everybodys.shape[0] >= total:
        return jnp.arange(total, dtype=slots_B.dtype), slots_B
    numbers_S = jnp.arange(total, dtype=slots_B.dtype)
    is_idle_S = jnp.all(everybodys[:, None] != numbers_S[None], axis=0)
    active_A = jnp.argsort(is_idle_S, stable=True)[: everybodys.shape[0]].astype(slots_B.dtype)
    index_B = jnp.argmax(active_A[None] == slots_B[:, None], axis=1).astype(slots_B.dtype)
    return active_A, index_B


def take_slots(stack: Any, slots_A: Array) -> Any:
    """Return some slots [..., A, R, X] of a tree of stacked leaves; the stack itself if A is all of them."""
    return jax.tree.map(
        lambda x: x if x.shape[-3] == slots_A.shape[0] else jnp.take(x, slots_A, axis=x.ndim - 3), stack
    )


def add_to_slots(stack: Any, some: Any, slots_A: Array) -> Any:
    """Add to the slots that ``take_slots`` took; the others are not touched."""
    count = slots_A.shape[0]
    if all(x.shape[-3] == count for x in jax.tree.leaves(stack)):
        return jax.tree.map(jnp.add, stack, some)

    def add(number: Array, stack: Any) -> Any:
        slot, one = slots_A[number], take_slot(some, number)
        return put_slot(stack, jax.tree.map(jnp.add, take_slot(stack, slot), one), slot)

    return lax.fori_loop(0, count, add, stack)


def put_slot(stack: Any, one: Any, slot: Array) -> Any:
    """Return the stack with one slot replaced."""
    return jax.tree.map(
        lambda x, new: lax.dynamic_update_index_in_dim(x, new.astype(x.dtype), slot, x.ndim - 3), stack, one
    )
