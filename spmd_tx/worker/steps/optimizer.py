"""The jitted optimizer step of one slot, whatever the optimizer is."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from spmd_tx.models.adapters.lora import Adapters
from spmd_tx.models.declared.model import HEAD, Model
from spmd_tx.sharding.collectives import sum_over_shards
from spmd_tx.sharding.tree_node import TreeNode
from spmd_tx.sharding.weight import specs
from spmd_tx.worker.steps.train_state import TrainState, put_slot, take_slot


class Trained(TreeNode):
    """Holds what a step changes, trees of the same structure. An optimizer with one moment keeps it in mu."""

    w: Any
    mu: Any
    nu: Any


class Updated(TreeNode):
    """Holds what a step leaves: the old numbers, if it is not applied."""

    trained: Trained
    norm: Any  # of the gradient, before it is clipped
    applied: Any  # whether all numbers are finite


@dataclass(frozen=True)
class UpdateRule:
    """Declares how an optimizer changes adapters."""

    inputs: Callable[[Model, Any], Any]  # of a command: float32 scalars, with ``grad_clip_norm``
    # (model, inputs, squares of the gradient, steps so far, old, gradient); within shard_map
    update: Callable[[Model, Any, Adapters[Any], Array, Trained, Adapters[Any]], Updated]


def clipped(grad: Any, squares: Any, limit: Array) -> tuple[Any, Array]:
    """Return the gradient within the limit on its norm (0 or less: there is none), and its norm before.

    ``squares`` are the sums of the leaves' squares over all shards.
    """
    norm = jnp.sqrt(sum(jax.tree.leaves(squares)))
    is_clipped = (limit > 0) & (norm > limit)
    factor = jnp.where(is_clipped, limit / norm, 1.0)
    return jax.tree.map(lambda x: x * factor, grad), norm


def if_finite(norm: Array, new: Trained, old: Trained) -> Updated:
    """Return the new numbers if all are finite, on all shards."""
    applied = jnp.isfinite(norm) & _all_finite((new.w, new.mu, new.nu))

    def choose(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda x, y: jnp.where(applied, x, y), new, old)

    chosen = Trained(choose(new.w, old.w), choose(new.mu, old.mu), choose(new.nu, old.nu))
    return Updated(chosen, norm, applied)


def _all_finite(tree: Any) -> Array:
    bad = sum(sum_over_shards(jnp.sum(~jnp.isfinite(x), dtype=jnp.int32)) for x in jax.tree.leaves(tree))
    return jnp.equal(bad, 0)


def squares_of(gradient: Any) -> Any:
    """Return the sum of the squares of each leaf, over all shards."""
    return jax.tree.map(lambda x: sum_over_shards(jnp.sum(jnp.square(x))), gradient)


def norms_of(squares: Iterable[tuple[str, Array]]) -> dict[str, Array]:
    """Return the norm of each group by the name of its metric, from groups and their sums of squares."""
    by_group = defaultdict[str, list[Array]](list)
    for group, square in squares:
        by_group[group].append(square)
    return {f"grad_norm_{group}": jnp.sqrt(sum(by_group[group])) for group in sorted(by_group)}


def make_optim_step(model: Model, mesh: Mesh, state: TrainState, optimizer: UpdateRule) -> Callable[..., Any]:
    """Make (state, slot, inputs) -> (state, metrics as in OptimStep); ``state`` is donated.

    Only the slot's own entries are read and written.
    """
    state_specs = specs(state)

    @partial(jax.jit, donate_argnums=0)
    @partial(jax.shard_map, mesh=mesh, in_specs=(state_specs, P(), P()), out_specs=(state_specs, P()))
    def optim_step(state: TrainState, slot: Array, inputs: Any) -> Any:
        w, grad, mu, nu = (take_slot(tree, slot) for tree in (state.w, state.grad_sum, state.mu, state.nu))
        squares = squares_of(grad)
        after = optimizer.update(model, inputs, squares, state.step[slot], Trained(w, mu, nu), grad)
        step = state.step.at[slot].add(after.applied.astype(jnp.int32))
        zeros = jax.tree.map(jnp.zeros_like, grad)
        pairs = squares.layers | {HEAD: squares.head}
        by_group = ((model.adapted[name].group, x) for name in pairs for x in jax.tree.leaves(pairs[name]))
        return (
            state.replace(
                w=put_slot(state.w, after.trained.w, slot),
                grad_sum=put_slot(state.grad_sum, zeros, slot),
                mu=put_slot(state.mu, after.trained.mu, slot),
                nu=put_slot(state.nu, after.trained.nu, slot),
                step=step,
            ),
            {"grad_norm": after.norm, "applied": after.applied} | norms_of(by_group),
        )

    return optim_step
