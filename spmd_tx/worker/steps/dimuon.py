"""Dimuon: steps along the sign of each factor's momentum, after it is preconditioned over rows and columns.

The parameters are those of the Tinker API; the formula is this project's own (docs/training.md).

Dimension key: R rank, W the width of a factor, which may be split; layers and experts come before them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jaxtyping import Float

from spmd_tx.models.adapters.lora import Adapters, has_experts, rank_in_experts
from spmd_tx.models.declared.model import Model
from spmd_tx.protocol.commands import DimuonStep
from spmd_tx.sharding.collectives import split_axes, sum_over_shards
from spmd_tx.sharding.mesh import FSDP, TP
from spmd_tx.sharding.tree_node import TreeNode
from spmd_tx.worker.steps.optimizer import Trained, Updated, UpdateRule, clipped, if_finite

DAMPING = 1e-4  # of mean squares, where the mean square of the whole factor is 1
SIGN_STEPS = 5
SIGN = 3.4445, -4.7750, 2.0315  # x, x³ and x⁵ of a step towards the sign (Jordan et al. 2024, Muon)
REFERENCE_RANK, RANK_EXPONENT = 32, 0.175  # of the correction of learning rates
WIDTH = (FSDP, TP)  # axes over which widths are split


class DimuonInputs(TreeNode):
    """Holds the hyperparameters of one step, float32 scalars."""

    learning_rate: Any  # corrected by the rank
    beta1: Any
    grad_clip_norm: Any  # 0 or less disables clipping
    rank: Any  # of the adapter
    expert_rank: Any  # of experts' factors in it


def dimuon_inputs(model: Model, command: DimuonStep) -> DimuonInputs:
    """Return the inputs of a command's step."""
    rank = command.rank
    rate = command.learning_rate * (rank / REFERENCE_RANK) ** RANK_EXPONENT
    numbers = rate, command.beta1, command.grad_clip_norm, rank, rank_in_experts(model, rank)
    return DimuonInputs(*map(np.float32, numbers))


def _update(
    model: Model, inputs: DimuonInputs, squares: Any, _: Array, old: Trained, grad: Adapters[Any]
) -> Updated:
    grad, norm = clipped(grad, squares, inputs.grad_clip_norm)
    mu = jax.tree.map(lambda mu, x: inputs.beta1 * mu + (1 - inputs.beta1) * x, old.mu, grad)

    def moved(w: Any, mu: Any, rank: Array) -> Any:
        return jax.tree.map(lambda x, m: x - inputs.learning_rate * direction(m, rank), w, mu)

    ranks = {name: inputs.expert_rank if has_experts(model, name) else inputs.rank for name in mu.layers}
    layers = {name: moved(old.w.layers[name], mu.layers[name], rank) for name, rank in ranks.items()}
    w = Adapters(layers, moved(old.w.head, mu.head, inputs.rank))
    return if_finite(norm, Trained(w, mu, old.nu), old)


def direction(momentum: Float[Array, "... R W"], rank: Float[Array, ""]) -> Float[Array, "... R W"]:
    """Return the preconditioned sign of each matrix, of Frobenius norm sqrt(``rank``), or zeros for zeros.

    Rows from ``rank`` on are zero, and stay so. Where widths are split, devices exchange the sums of rows and
    Gram matrices [..., R, R] only.
    """
    width = momentum.shape[-1] * np.prod([lax.axis_size(axis) for axis in split_axes(momentum, WIDTH)])
    square = jnp.square(momentum)
    of_rows = _over_width(jnp.sum(square, -1, keepdims=True)) / float(width)
    of_columns = jnp.sum(square, -2, keepdims=True) / rank
    mean = jnp.sum(of_rows, -2, keepdims=True) / rank
    scale = jnp.where(mean > 0, 1 / mean, 0.0)
    damped = lax.rsqrt(of_rows * scale + DAMPING) * lax.rsqrt(of_columns * scale + DAMPING)
    balanced = momentum * jnp.sqrt(scale) * damped
    gram = _over_width(_product("...rw,...sw->...rs", balanced, balanced))
    polynomial, square_norm = _sign_of(gram)
    factor = jnp.where(square_norm > 0, jnp.sqrt(rank) * lax.rsqrt(square_norm), 0.0)
    return _product("...rs,...sw->...rw", polynomial * factor, balanced)


def _sign_of(gram: Float[Array, "... R R"]) -> tuple[Float[Array, "... R R"], Float[Array, "... 1 1"]]:
    """Return P such that P X is nearly the sign of X, for the Gram matrix of X; and the square norm of P X.

    The steps of Newton-Schulz iteration on X multiply it by polynomials of its Gram matrix, so they are taken
    on that small matrix alone: P X has the Gram matrix P G P.
    """
    linear, cubic, quintic = SIGN
    total = jnp.trace(gram, axis1=-2, axis2=-1)[..., None, None]
    inverse = jnp.where(total > 0, 1 / total, 0.0)
    unit = jnp.broadcast_to(jnp.eye(gram.shape[-1], dtype=gram.dtype), gram.shape)

    def step(_: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        polynomial, gram = carry
        factor = linear * unit + cubic * gram + quintic * _matmul(gram, gram)
        return _matmul(factor, polynomial), _matmul(_matmul(factor, gram), factor)

    start = jnp.sqrt(inverse) * unit, gram * inverse
    polynomial, after = lax.fori_loop(0, SIGN_STEPS, step, start)
    return polynomial, jnp.trace(after, axis1=-2, axis2=-1)[..., None, None]


def _over_width(x: Array) -> Array:
    return sum_over_shards(x, WIDTH)


def _product(formula: str, *factors: Array) -> Array:
    return jnp.einsum(formula, *factors, precision=lax.Precision.HIGHEST)


def _matmul(x: Array, y: Array) -> Array:
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)


DIMUON = UpdateRule(dimuon_inputs, _update)
