"""AdamW (Loshchilov and Hutter 2019), as torch.optim.AdamW."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from spmd_tx.models.declared.model import Model
from spmd_tx.protocol.commands import OptimStep
from spmd_tx.sharding.tree_node import TreeNode
from spmd_tx.worker.steps.optimizer import Trained, Updated, UpdateRule, clipped, if_finite


class AdamWInputs(TreeNode):
    """Holds the hyperparameters of one step, float32 scalars."""

    learning_rate: Any
    beta1: Any
    beta2: Any
    eps: Any
    weight_decay: Any
    grad_clip_norm: Any  # 0 disables clipping


def adamw_inputs(_: Model, command: OptimStep) -> AdamWInputs:
    """Return the inputs of a command's step."""
    return AdamWInputs(*(np.float32(getattr(command, name)) for name in AdamWInputs.__dataclass_fields__))


def adamw(inputs: AdamWInputs, rates: Any, squares: Any, step: Array, old: Trained, grad: Any) -> Updated:
    """Update trees of arrays with decoupled weight decay.

    ``rates`` are the learning rates of the leaves, ``squares`` the sums of their gradients' squares over all
    shards.
    """
    grad, norm = clipped(grad, squares, inputs.grad_clip_norm)
    adam = optax.scale_by_adam(inputs.beta1, inputs.beta2, inputs.eps)
    with jax.numpy_dtype_promotion("standard"):  # optax raises a float to the power of an int
        updates, after = adam.update(grad, optax.ScaleByAdamState(step, old.mu, old.nu))
    moments = cast(optax.ScaleByAdamState, after)
    # A parameter that never had a gradient does not move: with eps 0 its update would be 0 / 0.
    updates = jax.tree.map(lambda update, mu: jnp.where(mu == 0, 0.0, update), updates, moments.mu)
    w = jax.tree.map(
        lambda x, update, rate: x - rate * (update + inputs.weight_decay * x), old.w, updates, rates
    )
    return if_finite(norm, Trained(w, moments.mu, moments.nu), old)


def _of_adapter(_: Model, inputs: AdamWInputs, squares: Any, step: Array, old: Trained, grad: Any) -> Updated:
    return adamw(inputs, jax.tree.map(lambda _: inputs.learning_rate, old.w), squares, step, old, grad)


ADAMW = UpdateRule(adamw_inputs, _of_adapter)
