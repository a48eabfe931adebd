"""Metrics of reinforcement learning: advantages, entropy, divergence, and what was clipped. Pure."""

import numpy as np

from spmd_tx.coordinator.training.batching import PackedRequest
from spmd_tx.protocol.commands import LOSS_NAMES, LossInputs

ADVANTAGE = "abs_advantage:mean"
CLIPPED = "ppo", "cispo", "gspo", "stable_reinforce"


def loss_metrics(packed: PackedRequest, logprobs: list[np.ndarray]) -> dict[str, float]:
    """Return means over the tokens that count, those with an advantage; nothing for cross_entropy.

    With p a token's probability now and q when it was sampled, they estimate from the tokens at hand:
    ``entropy`` by -log p, ``kl`` of the sampler from the trained policy by r - 1 - log r, r = p/q ("k3",
    Schulman 2020). ``clip_fraction`` is the share whose ratio, of gspo the sequence's, is beyond a threshold.
    ``abs_advantage`` is a mean over datums: of each, the size of the mean over its tokens that count.
    """
    inputs = [chunk.loss for chunk in packed.chunks]
    name = LOSS_NAMES[int(inputs[0].kinds[0])]
    if name == "cross_entropy":
        return {}

    def tokens(key: str) -> np.ndarray:
        return _tokens(packed, inputs, key)

    advantages = tokens("advantages").astype(np.float64)
    counts = advantages != 0
    if not counts.any():
        return {ADVANTAGE: 0.0}
    current = np.concatenate(logprobs).astype(np.float64)
    log_ratios = current - tokens("sampling_logprobs")
    with np.errstate(over="ignore", invalid="ignore"):
        means = {
            ADVANTAGE: np.abs(_of_sequences(advantages, counts, packed.ends)[packed.ends - 1]).mean(),
            "entropy:mean": -current[counts].mean(),
            "kl:mean": (np.expm1(log_ratios[counts]) - log_ratios[counts]).mean(),
        }
        if name in CLIPPED:
            if name == "gspo":
                log_ratios = _of_sequences(log_ratios, tokens("ratio_mask") != 0, packed.ends)
            ratios = np.exp(log_ratios)
            beyond = (ratios < tokens("clip_low")) | (ratios > tokens("clip_high"))
            means["clip_fraction:mean"] = beyond[counts].mean()
    return {key: float(value) for key, value in means.items()}


def _tokens(packed: PackedRequest, inputs: list[LossInputs], key: str) -> np.ndarray:
    """Return an input [tokens of all datums] in datum order."""
    return np.concatenate([getattr(each, key).ravel() for each in inputs])[packed.destination]


def _of_sequences(values: np.ndarray, counts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return for each token the mean over those tokens of its datum that count; 0 without any."""
    starts = np.concatenate([[0], ends[:-1]])
    totals = np.add.reduceat(np.where(counts, values, 0.0), starts)
    means = totals / np.maximum(np.add.reduceat(counts, starts, dtype=np.int64), 1)
    return np.repeat(means, ends - starts)
