"""Per-token losses of the Tinker API: pure functions of one log-probability; sums are taken by the caller.

Definitions: https://tinker-docs.thinkingmachines.ai/losses. ``ratio`` is exp(logprob - sampling logprob).
A position whose weight or advantage is 0 adds exactly 0 to loss and gradient, whatever its other inputs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from spmd_tx.protocol import LOSS_NAMES


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenLossInputs:
    """Per-token inputs [B, T]; per-row ones have shape [B, 1]."""

    kinds: Any  # int32 [B, 1]
    clip_low: Any  # float32 [B, 1]
    clip_high: Any  # float32 [B, 1]
    beta: Any  # float32 [B, 1]
    weights: Any  # float32 [B, T]
    advantages: Any  # float32 [B, T]
    sampling_logprobs: Any  # float32 [B, T]; nats


Loss = Callable[[Array, TokenLossInputs], Array]


def cross_entropy(logprobs: Array, inputs: TokenLossInputs) -> Array:
    return -logprobs * inputs.weights


def importance_sampling(logprobs: Array, inputs: TokenLossInputs) -> Array:
    return -jnp.exp(logprobs - inputs.sampling_logprobs) * inputs.advantages


def ppo(logprobs: Array, inputs: TokenLossInputs) -> Array:
    """Clipped surrogate objective (Schulman et al. 2017)."""
    ratio = jnp.exp(logprobs - inputs.sampling_logprobs)
    clipped = jnp.clip(ratio, inputs.clip_low, inputs.clip_high)
    return -jnp.minimum(ratio * inputs.advantages, clipped * inputs.advantages)


def cispo(logprobs: Array, inputs: TokenLossInputs) -> Array:
    """Clipped importance weights, not clipped updates (MiniMax-M1, 2025)."""
    ratio = jnp.exp(logprobs - inputs.sampling_logprobs)
    return (
        -lax.stop_gradient(jnp.clip(ratio, inputs.clip_low, inputs.clip_high)) * logprobs * inputs.advantages
    )


def dro(logprobs: Array, inputs: TokenLossInputs) -> Array:
    """Direct reward optimisation with a quadratic penalty on the log-ratio (Richemond et al. 2024)."""
    log_ratio = logprobs - inputs.sampling_logprobs
    return -(logprobs * inputs.advantages - 0.5 * inputs.beta * jnp.square(log_ratio))


LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
}


def token_losses(logprobs: Float[Array, "B T"], inputs: TokenLossInputs) -> Float[Array, "B T"]:
    """Each row's own loss.

    Positions that do not count are masked on both sides of the formula: an infinity in their inputs must
    reach neither the loss nor, on the way back, the gradient.
    """
    total = jnp.zeros_like(logprobs)
    for number, name in enumerate(LOSS_NAMES):
        driver = inputs.weights if name == "cross_entropy" else inputs.advantages
        counts = (inputs.kinds == number) & (driver != 0)
        loss = LOSSES[name](jnp.where(counts, logprobs, 0.0), inputs)
        total = total + jnp.where(counts, loss, 0.0)
    return total
