"""One slot as a vector of bits, spread evenly over all devices, so that a swap moves nothing twice.

A tree of stacks has the slots of the training state, or of the sampler bank; all its leaves have items of one
size.

Leaves that are not split over an axis of the mesh are replicated along it; each of those devices gives its
own part to the vector, and gathers the others' parts on the way in. Values move as bits, so they come back
unchanged, NaN included.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
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
from spmd_tx.worker.steps.sample import Bank

VECTOR = P(AXES)  # the spec of a vector
BITS = {2: jnp.uint16, 4: jnp.uint32}  # its dtype, by the bytes of an item


class SwapSteps(NamedTuple):
    """Holds the two steps that swap a slot out and in."""

    out: Callable[[Any, Any], Array]  # (stacks, slot) -> vector
    back: Callable[[Any, Array, Any], Any]  # (stacks, vector, slot) -> stacks, which are donated


class _Piece(NamedTuple):
    """Locates one leaf's entry of a slot within its group."""

    leaf: int
    axis: int  # of the slot
    shape: tuple[int, ...]  # of the entry, on one device
    start: int  # words


@dataclass
class _Group:
    """Holds leaves replicated over the same axes of the mesh, laid end to end and cut into equal shares."""

    repeats: tuple[str, ...]
    devices: int  # that share them
    pieces: list[_Piece] = field(default_factory=list)
    words: int = 0

    @property
    def share(self) -> int:
        """The words of a device."""
        return -(-self.words // self.devices)


def make_swap_steps(mesh: Mesh, declared: Any) -> SwapSteps:
    """Compile the steps for a declared tree of stacks."""
    leaves, tree = jax.tree.flatten(declared)
    dtypes, bits = [leaf.dtype for leaf in leaves], _bits(leaves)
    groups = _groups(mesh, leaves)
    stack_specs = specs(declared)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(stack_specs, P()), out_specs=VECTOR)
    def out(stacked: Any, slot: Array) -> Array:
        stacks = jax.tree.leaves(stacked)
        return jnp.concatenate([varying(_own_share(group, stacks, slot, bits)) for group in groups])

    @partial(jax.jit, donate_argnums=0)
    @partial(jax.shard_map, mesh=mesh, in_specs=(stack_specs, VECTOR, P()), out_specs=stack_specs)
    def back(stacked: Any, vector: Array, slot: Array) -> Any:
        stacks, start = jax.tree.leaves(stacked), 0
        for group in groups:
            words = _gather(group, vector[start : start + group.share])
            start += group.share
            for piece in group.pieces:
                content = words[piece.start : piece.start + math.prod(piece.shape)].reshape(piece.shape)
                entry = lax.bitcast_convert_type(content, dtypes[piece.leaf])
                stacks[piece.leaf] = lax.dynamic_update_index_in_dim(
                    stacks[piece.leaf], entry, slot, piece.axis
                )
        return jax.tree.unflatten(tree, stacks)

    return SwapSteps(out, back)


def make_page_in(mesh: Mesh, bank: Bank) -> Callable[[Bank, Array, Any, Any], Bank]:
    """Compile the step that fills a slot of the declared bank: (bank, vector, slot, scale [2]).

    The bank is donated.
    """
    back = make_swap_steps(mesh, bank.w).back

    @partial(jax.jit, donate_argnums=0, out_shardings=shardings(mesh, bank))
    def page_in(bank: Bank, vector: Array, slot: Array, scale: Array) -> Bank:
        return Bank(back(bank.w, vector, slot), bank.scale.at[slot].set(scale))

    return page_in


def vector(declared: Any, mesh: Mesh) -> Weight:
    """Declare the vector of one slot of a declared tree of stacks."""
    leaves = jax.tree.leaves(declared)
    words = mesh.size * sum(group.share for group in _groups(mesh, leaves))
    return Weight((words,), VECTOR, _bits(leaves))


def _bits(leaves: list[Weight]) -> Any:
    (size,) = {jnp.dtype(leaf.dtype).itemsize for leaf in leaves}
    return BITS[size]


def _groups(mesh: Mesh, leaves: list[Weight]) -> list[_Group]:
    groups: dict[tuple[str, ...], _Group] = {}
    for number, leaf in enumerate(leaves):
        repeats = tuple(axis for axis in AXES if axis not in _axes(leaf.spec))
        devices = math.prod(mesh.shape[axis] for axis in repeats)
        group = groups.setdefault(repeats, _Group(repeats, devices))
        axis = max(0, len(leaf.shape) - 3)
        local = shardings(mesh, leaf).shard_shape(leaf.shape)
        shape = local[:axis] + local[axis + 1 :]
        group.pieces.append(_Piece(number, axis, shape, group.words))
        group.words += math.prod(shape)
    return list(groups.values())


def _axes(spec: P) -> Iterable[str]:
    for part in spec:
        yield from (part,) if isinstance(part, str) else part or ()


def _own_share(group: _Group, stacks: list[Array], slot: Array, bits: Any) -> Array:
    words = []
    for piece in group.pieces:
        entry = lax.dynamic_index_in_dim(stacks[piece.leaf], slot, piece.axis, keepdims=False)
        words.append(lax.bitcast_convert_type(entry, bits).ravel())
    # Apart, each is a copy of memory; CPUs would choose among them for every single word of a fused loop.
    joined = jnp.concatenate(lax.optimization_barrier(words))
    if group.devices == 1:
        return joined
    padded = jnp.pad(joined, (0, group.share * group.devices - group.words))
    return lax.dynamic_slice_in_dim(padded, lax.axis_index(group.repeats) * group.share, group.share)


def _gather(group: _Group, share: Array) -> Array:
    for axis in reversed(group.repeats):
        share = lax.all_gather(share, axis, axis=0, tiled=True, to="invarying")
    return share
