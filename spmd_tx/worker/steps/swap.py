"""One training slot as a vector of bits, spread evenly over all devices, so that a swap moves nothing twice.

Leaves that are not split over an axis of the mesh are replicated along it; each of those devices gives its
own part to the vector, and gathers the others' parts on the way in. Values move as bits, so they come back
unchanged, NaN included.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from spmd_tx.sharding.collectives import varying
from spmd_tx.sharding.mesh import AXES
from spmd_tx.sharding.weight import Weight, shardings, specs
from spmd_tx.worker.steps.train_state import TrainState

VECTOR = P(AXES)  # the spec of a vector; uint32


@dataclass(frozen=True)
class SwapSteps:
    """Holds the two steps that swap a slot out and in."""

    out: Callable[[TrainState, Any], Array]  # (state, slot) -> vector
    back: Callable[[TrainState, Array, Any], TrainState]  # (state, vector, slot); the state is donated


class _Piece(NamedTuple):
    """Locates one leaf's entry of a slot within its group."""

    leaf: int
    axis: int  # of the slot
    shape: tuple[int, ...]  # of the entry, on one device
    start: int  # words


@dataclass(frozen=True)
class _Group:
    """Holds leaves replicated over the same axes of the mesh, laid end to end and cut into equal shares."""

    repeats: tuple[str, ...]
    pieces: list[_Piece]
    words: int
    share: int  # words per device


def make_swap_steps(mesh: Mesh, state: TrainState) -> SwapSteps:
    """Compile the steps for the declared training state."""
    leaves, tree = jax.tree.flatten(state)
    dtypes = [leaf.dtype for leaf in leaves]
    groups = _groups(mesh, leaves)
    state_specs = specs(state)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(state_specs, P()), out_specs=VECTOR)
    def out(state: TrainState, slot: Array) -> Array:
        stacks = jax.tree.leaves(state)
        return jnp.concatenate([varying(_own_share(mesh, group, stacks, slot)) for group in groups])

    @partial(jax.jit, donate_argnums=0)
    @partial(jax.shard_map, mesh=mesh, in_specs=(state_specs, VECTOR, P()), out_specs=state_specs)
    def back(state: TrainState, vector: Array, slot: Array) -> TrainState:
        stacks, start = jax.tree.leaves(state), 0
        for group in groups:
            words = _gather(group, vector[start : start + group.share])
            start += group.share
            for piece in group.pieces:
                bits = words[piece.start : piece.start + math.prod(piece.shape)].reshape(piece.shape)
                entry = lax.bitcast_convert_type(bits, dtypes[piece.leaf])
                stacks[piece.leaf] = lax.dynamic_update_index_in_dim(
                    stacks[piece.leaf], entry, slot, piece.axis
                )
        return jax.tree.unflatten(tree, stacks)

    return SwapSteps(out, back)


def vector(state: TrainState, mesh: Mesh) -> Weight:
    """Declare the vector of one slot of a declared state."""
    groups = _groups(mesh, jax.tree.leaves(state))
    return Weight((mesh.size * sum(group.share for group in groups),), VECTOR, jnp.uint32)


def _groups(mesh: Mesh, leaves: list[Weight]) -> list[_Group]:
    groups: dict[tuple[str, ...], _Group] = {}
    for number, leaf in enumerate(leaves):
        repeats = tuple(axis for axis in AXES if axis not in _axes(leaf.spec))
        group = groups.get(repeats, _Group(repeats, [], 0, 0))
        axis = max(0, len(leaf.shape) - 3)
        local = shardings(mesh, leaf).shard_shape(leaf.shape)
        shape = local[:axis] + local[axis + 1 :]
        pieces = [*group.pieces, _Piece(number, axis, shape, group.words)]
        groups[repeats] = replace(group, pieces=pieces, words=group.words + math.prod(shape))
    devices = {repeats: math.prod(mesh.shape[axis] for axis in repeats) for repeats in groups}
    return [replace(group, share=-(-group.words // devices[group.repeats])) for group in groups.values()]


def _axes(spec: P) -> Iterable[str]:
    for part in spec:
        yield from (part,) if isinstance(part, str) else part or ()


def _own_share(mesh: Mesh, group: _Group, stacks: list[Array], slot: Array) -> Array:
    words = []
    for piece in group.pieces:
        entry = lax.dynamic_index_in_dim(stacks[piece.leaf], slot, piece.axis, keepdims=False)
        words.append(lax.bitcast_convert_type(entry, jnp.uint32).ravel())
    devices = math.prod(mesh.shape[axis] for axis in group.repeats)
    padded = jnp.pad(jnp.concatenate(words), (0, group.share * devices - group.words))
    mine = lax.axis_index(group.repeats) if group.repeats else 0
    return lax.dynamic_slice_in_dim(padded, mine * group.share, group.share)


def _gather(group: _Group, share: Array) -> Array:
    for axis in reversed(group.repeats):
        share = lax.all_gather(share, axis, axis=0, tiled=True, to="invarying")
    return share
