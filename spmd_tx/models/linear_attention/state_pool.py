"""States of the sequences being sampled, for layers that keep one of a fixed size instead of pages.

A slot holds one sequence's states of all such layers. Rows being sampled have a slot each; the others are
snapshots, from which rows may begin (sampling/cache/state_slots.py of the coordinator decides). Slot 0 holds
zeros, the state of a sequence that has read nothing, and is never written.

Dimension key: L layer with a state, P slot (of one data shard), B row, C slot to copy.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Int

from spmd_tx.models.attention.kv_cache import KvCache, cache_weights, copy_pages, without_trash
from spmd_tx.models.attention.window_ring import ring_weights
from spmd_tx.models.declared.delta_rule import DeltaRule
from spmd_tx.models.declared.layers import Mixer
from spmd_tx.models.declared.mixers import Softmax
from spmd_tx.models.declared.model import Model
from spmd_tx.models.forward_pass import StateSlots
from spmd_tx.models.linear_attention import delta_memory
from spmd_tx.models.linear_attention.delta_layer import State
from spmd_tx.protocol.kernels import Kernels
from spmd_tx.sharding.mesh import DATA, EP, FSDP, TP, AnyMesh
from spmd_tx.sharding.tree_node import TreeNode
from spmd_tx.sharding.weight import Weight

NOTHING = 0  # the slot of zeros: a copy of it is a slot that has read nothing


def pool_weights(sizes: Mixer, mesh: AnyMesh, layers: int, slots: int, dtype: DTypeLike) -> State | KvCache:
    """Declare a pool with ``slots`` slots per data shard, slot 0 among them; its arrays begin as zeros.

    Of attention within a window it has rings. The channels of ``inputs`` are in the order of devices of tp,
    each with its own queries, keys and values.
    """
    lead = (layers, slots * mesh.shape[FSDP] * mesh.shape[EP])
    if isinstance(sizes, Softmax):
        return ring_weights(sizes, mesh, lead, dtype)
    assert isinstance(sizes, DeltaRule)
    memory, inputs = (sizes.v_heads, sizes.k_width, sizes.v_width), (sizes.taps - 1, sizes.channels)
    return State(
        Weight((*lead, *memory), P(None, DATA, TP, None, None), jnp.float32),
        Weight((*lead, *inputs), P(None, DATA, None, TP), dtype),
    )


class Keep(TreeNode):
    """Holds what all layers keep of the sequences being sampled: pages, and states in slots."""

    pages: Any
    states: Any  # State, or KvCache with rings (window_ring.py)


def cache_and_states(
    model: Model, mesh: AnyMesh, pages: int, page_size: int, slots: int, dtype: DTypeLike
) -> KvCache | Keep:
    """Declare what all layers keep of sequences: pages and, if the model has states, slots per data shard."""
    cache, sizes = cache_weights(model, mesh, pages, page_size, dtype), model.stateful
    if sizes is None:
        return cache
    return Keep(cache, pool_weights(sizes, mesh, model.n_layers - model.n_paged, slots, dtype))


def pages_of(cache: KvCache | Keep) -> KvCache:
    """Return the pages of what all layers keep."""
    return cache.pages if isinstance(cache, Keep) else cache


def with_pages(cache: KvCache | Keep, change: Callable[[KvCache], KvCache]) -> KvCache | Keep:
    """Change the pages, and leave states as they are."""
    pages = change(pages_of(cache))
    return cache.replace(pages=pages) if isinstance(cache, Keep) else pages


def read(pool: State, layer: Array, slots: StateSlots, kernels: Kernels) -> State:
    """Return one layer's states of rows. On GPUs memories that a decode changes stay in the pool."""
    if slots.decodes and kernels.has_gpu_products and delta_memory.fits(pool.memory.shape):
        where = layer, slots.sources_B, slots.targets_B
        memory = delta_memory.InPool(pool.memory, *where, interpret=kernels.interpret)
        return State(memory, pool.inputs[layer, slots.sources_B])
    return jax.tree.map(lambda states: states[layer, slots.sources_B], pool)


def write(pool: State, layer: Array, slots_B: Int[Array, " B"], states: State) -> State:
    """Write one layer's states of rows. No two slots may be the same but 0, to which nothing is written."""
    if states.memory.shape == pool.memory.shape:  # it stayed in the pool
        return states.replace(inputs=_written(pool.inputs, layer, slots_B, states.inputs))
    return jax.tree.map(lambda old, new: _written(old, layer, slots_B, new), pool, states)


def _written(old: Array, layer: Array, slots_B: Array, new: Array) -> Array:
    slots_B = without_trash(slots_B, old.shape[1])
    return old.at[layer, slots_B].set(new.astype(old.dtype), unique_indices=True, mode="drop")


def bring_home(
    cache: KvCache | Keep, slots_B: Array | None, own_B: Array | None, depths_B: Int[Array, " B"]
) -> KvCache | Keep:
    """Copy the states of leaders that are in other slots than their own into these; rings never move."""
    if slots_B is None or own_B is None or not isinstance(cache, Keep) or isinstance(cache.states, KvCache):
        return cache
    is_away_B = (slots_B != own_B) & (depths_B == 0)
    copies_B2 = jnp.where(is_away_B[:, None], jnp.stack([slots_B, own_B], axis=1), NOTHING)
    return cache.replace(states=copy_pages(cache.states, copies_B2))
