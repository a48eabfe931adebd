"""Losses of the Tinker API: pure functions of log-probabilities; sums are taken by the caller.

Definitions: docs/losses.md. ``ratio`` is exp(logprob - sampling logprob). A position whose weight or
advantage is 0 adds exactly 0 to loss and gradient, whatever its other inputs.
Dimension key: B row, T token, K target.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from spmd_tx.protocol.commands import LOSS_NAMES
from spmd_tx.sharding.tree_node import TreeNode


class TokenLossInputs(TreeNode):
    """Holds the inputs of losses: per token [B, T], per row [B, 1]."""

    kinds: Any  # int32 [B, 1]
    clip_low: Any  # float32 [B, T]
    clip_high: Any  # float32 [B, T]
    beta: Any  # float32 [B, 1]
    kl_coeff: Any  # float32 [B, 1]
    weights: Any  # float32 [B, T], or [B, T, K] with K targets per position
    advantages: Any  # float32 [B, T]
    sampling_logprobs: Any  # float32 [B, T]; nats
    ratio_mask: Any = None  # float32 [B, T]: tokens of a sequence's ratio; None: no loss needs sequences


Loss = Callable[[Array, TokenLossInputs], Array]


def cross_entropy(logprobs: Array, inputs: TokenLossInputs) -> Array:
    return -logprobs * inputs.weights


def importance_sampling(logprobs: Array, inputs: TokenLossInputs) -> Array:
    return -jnp.exp(logprobs - inputs.sampling_logprobs) * inputs.advantages


def _clipped_surrogate(ratio: Array, inputs: TokenLossInputs) -> Array:
    clipped = jnp.clip(ratio, inputs.clip_low, inputs.clip_high)
    return -jnp.minimum(ratio * inputs.advantages, clipped * inputs.advantages)


def ppo(logprobs: Array, inputs: TokenLossInputs) -> Array:
    """Clipped surrogate objective (Schulman et al. 2017)."""
    return _clipped_surrogate(jnp.exp(logprobs - inputs.sampling_logprobs), inputs)


def cispo(logprobs: Array, inputs: TokenLossInputs) -> Array:
    """Clipped importance weights, not clipped updates (MiniMax-M1, 2025)."""
    ratio = jnp.exp(logprobs - inputs.sampling_logprobs)
    return (
        -lax.stop_gradient(jnp.clip(ratio, inputs.clip_low, inputs.clip_high)) * logprobs * inputs.advantages
    )


def dro(logprobs: Array, inputs: TokenLossInputs) -> Array:
    """Direct reward optimization with a quadratic penalty on the log-ratio (Richemond et al. 2024)."""
    log_ratio = logprobs - inputs.sampling_logprobs
    return -(logprobs * inputs.advantages - 0.5 * inputs.beta * jnp.square(log_ratio))


def stable_reinforce(logprobs: Array, inputs: TokenLossInputs) -> Array:
    """REINFORCE with truncated importance weights, and penalties on the distance from the sampler.

    Weights are truncated at ``clip_high``, beyond which the penalty of ``kl_coeff`` is linear, so that its
    gradient is (truncated ratio - 1) everywhere; ``beta`` weighs the quadratic penalty.
    """
    log_ratio = logprobs - inputs.sampling_logprobs
    limit = jnp.log(inputs.clip_high)
    weight = lax.stop_gradient(jnp.exp(jnp.minimum(log_ratio, limit)))
    near = jnp.minimum(log_ratio, limit)
    divergence = jnp.exp(near) - 1 - near + (inputs.clip_high - 1) * (log_ratio - near)
    penalty = inputs.kl_coeff * divergence + 0.5 * inputs.beta * jnp.square(log_ratio)
    return -weight * logprobs * inputs.advantages + penalty


LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "stable_reinforce": stable_reinforce,
}


def token_losses(logprobs: Float[Array, "B T *K"], inputs: TokenLossInputs) -> Float[Array, "B T"]:
    """Compute each row's own loss, for the losses that look at one token at a time.

    Positions that do not count are masked both before and after the formula: an infinity in their inputs
    must reach neither the loss nor the gradient.
    """
    if logprobs.ndim == 3:  # only cross_entropy has several targets per position
        counts = inputs.weights != 0
        losses = cross_entropy(jnp.where(counts, logprobs, 0.0), inputs)
        return jnp.sum(jnp.where(counts, losses, 0.0), axis=-1)
    total = jnp.zeros_like(logprobs)
    for number, name in enumerate(LOSS_NAMES):
        if name not in LOSSES:
            continue
        driver = inputs.weights if name == "cross_entropy" else inputs.advantages
        counts = (inputs.kinds == number) & (driver != 0)
        loss = LOSSES[name](jnp.where(counts, logprobs, 0.0), inputs)
        total = total + jnp.where(counts, loss, 0.0)
    return total


def sequence_losses(
    logprobs: Float[Array, "B T"], inputs: TokenLossInputs, segments: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """Compute the losses [B, T] of gspo: GSPO-token (Zheng et al. 2025), with one ratio per sequence.

    The ratio is the geometric mean of its tokens' ratios where ``ratio_mask`` is not 0. Each token's loss is
    ppo's with it, as if the token's own log-probability had led to it.
    """
    is_in_ratio = inputs.ratio_mask != 0
    log_ratios = jnp.where(is_in_ratio, lax.stop_gradient(logprobs) - inputs.sampling_logprobs, 0.0)
    count = segment_sums(is_in_ratio.astype(logprobs.dtype), segments)
    ratio = jnp.exp(segment_sums(log_ratios, segments) / jnp.maximum(count, 1.0))
    counts = inputs.advantages != 0
    counted = jnp.where(counts, logprobs, 0.0)
    losses = _clipped_surrogate(ratio * jnp.exp(counted - lax.stop_gradient(counted)), inputs)
    return jnp.where(counts, losses, 0.0)


def segment_sums(values: Float[Array, "B T"], segments: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Sum over each position's segment (neighbours with the same number), in a fixed order."""
    length = segments.shape[1]
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    ends = jnp.pad(begins[:, 1:], ((0, 0), (0, 1)), constant_values=True)

    def join(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        (left_sum, left_begins), (right_sum, right_begins) = left, right
        return jnp.where(right_begins, right_sum, left_sum + right_sum), left_begins | right_begins

    sums, _ = lax.associative_scan(join, (values, begins), axis=1)
    place = jnp.arange(length, dtype=jnp.int32)[None, :]
    end = lax.cummin(jnp.where(ends, place, jnp.int32(length - 1)), axis=1, reverse=True)
    return jnp.take_along_axis(sums, end, axis=1)
