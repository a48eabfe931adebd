"""The jitted optimizer step of one slot."""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.struct import PyTreeNode
from jax import Array
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from spmd_tx.models.adapters.lora import Adapters, group_of
from spmd_tx.models.declared.model import Model
from spmd_tx.protocol.commands import OptimStep
from spmd_tx.sharding.collectives import sum_over_shards
from spmd_tx.sharding.weight import specs
from spmd_tx.worker.steps.train_state import TrainState, put_slot, take_slot


class AdamWInputs(PyTreeNode):
    """Holds the hyperparameters of one step, float32 scalars."""

    learning_rate: Any
    beta1: Any
    beta2: Any
    eps: Any
    weight_decay: Any
    grad_clip_norm: Any  # 0 disables clipping


def adamw_inputs(command: OptimStep) -> AdamWInputs:
    """Return the inputs of a command's step."""
    return AdamWInputs(*(np.float32(getattr(command, name)) for name in AdamWInputs.__dataclass_fields__))


def _all_finite(tree: Any) -> Array:
    bad = sum(sum_over_shards(jnp.sum(~jnp.isfinite(x), dtype=jnp.int32)) for x in jax.tree.leaves(tree))
    return jnp.equal(bad, 0)


def _squares(adapters: Adapters[Any]) -> Adapters[Any]:
    """Return the sum of the squares of each factor, over all shards."""
    return jax.tree.map(lambda x: sum_over_shards(jnp.sum(jnp.square(x))), adapters)


def _norms(model: Model, squares: Adapters[Any]) -> dict[str, Array]:
    """Return the norm of each group's factors, by the name of its metric."""
    by_group: dict[str, list[Array]] = {"unembed": jax.tree.leaves(squares.head)}
    for name, factors in squares.layers.items():
        by_group.setdefault(group_of(model, name), []).extend(jax.tree.leaves(factors))
    return {f"grad_norm_{group}": jnp.sqrt(sum(of_group)) for group, of_group in sorted(by_group.items())}


class Updated(PyTreeNode):
    """Holds what a step of AdamW leaves: the old numbers, if it is not applied."""

    w: Any
    mu: Any
    nu: Any
    norm: Any  # of the gradient, before it is clipped
    applied: Any  # whether all numbers are finite


def adamw(
    inputs: AdamWInputs, rates: Any, squares: Any, step: Array, w: Any, grad: Any, mu: Any, nu: Any
) -> Updated:
    """Update trees of arrays with decoupled weight decay (Loshchilov and Hutter 2019), as torch.optim.AdamW.

    ``rates`` are the learning rates of the leaves, ``squares`` the sums of their gradients' squares over all
    shards.
    """
    norm = jnp.sqrt(sum(jax.tree.leaves(squares)))
    is_clipped = (inputs.grad_clip_norm > 0) & (norm > inputs.grad_clip_norm)
    factor = jnp.where(is_clipped, inputs.grad_clip_norm / norm, 1.0)
    grad = jax.tree.map(lambda x: x * factor, grad)

    adam = optax.scale_by_adam(inputs.beta1, inputs.beta2, inputs.eps)
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to the power of an int
        updates, after = adam.update(grad, optax.ScaleByAdamState(step, mu, nu))
    moments = cast(optax.ScaleByAdamState, after)
    # A parameter that never had a gradient does not move: with eps 0 its update would be 0 / 0.
    updates = jax.tree.map(lambda update, mu: jnp.where(mu == 0, 0.0, update), updates, moments.mu)
    new_w = jax.tree.map(
        lambda x, update, rate: x - rate * (update + inputs.weight_decay * x), w, updates, rates
    )
    applied = jnp.isfinite(norm) & _all_finite((new_w, moments.mu, moments.nu))

    def choose(new: Any, old: Any) -> Any:
        return jax.tree.map(lambda x, y: jnp.where(applied, x, y), new, old)

    return Updated(choose(new_w, w), choose(moments.mu, mu), choose(moments.nu, nu), norm, applied)


def make_optim_step(model: Model, mesh: Mesh, state: TrainState) -> Callable[..., Any]:
    """Make (state, slot, inputs) -> (state, metrics as in OptimStep); ``state`` is donated.

    Only the slot's own entries are read and written.
    """
    state_specs = specs(state)

    @partial(jax.jit, donate_argnums=0)
    @partial(jax.shard_map, mesh=mesh, in_specs=(state_specs, P(), P()), out_specs=(state_specs, P()))
    def optim_step(state: TrainState, slot: Array, inputs: AdamWInputs) -> Any:
        w, grad, mu, nu = (take_slot(tree, slot) for tree in (state.w, state.grad_sum, state.mu, state.nu))
        squares = _squares(grad)
        rates = jax.tree.map(lambda _: inputs.learning_rate, w)
        after = adamw(inputs, rates, squares, state.step[slot], w, grad, mu, nu)
        step = state.step.at[slot].add(after.applied.astype(jnp.int32))
        zeros = jax.tree.map(jnp.zeros_like, grad)
        return (
            state.replace(
                w=put_slot(state.w, after.w, slot),
                grad_sum=put_slot(state.grad_sum, zeros, slot),
                mu=put_slot(state.mu, after.mu, slot),
                nu=put_slot(state.nu, after.nu, slot),
                step=step,
            ),
            {"grad_norm": after.norm, "applied": after.applied} | _norms(model, squares),
        )

    return optim_step
