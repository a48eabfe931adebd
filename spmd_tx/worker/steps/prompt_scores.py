"""Scores of a prompt's tokens: log-probabilities, most likely tokens, targets and draws, chunk by chunk.

Dimension key: B row, T token, D model width, V vocabulary (this device's part), W wanted tokens per position.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax import Array, lax

from spmd_tx.models import head
from spmd_tx.models.sampling import draw_several
from spmd_tx.sharding.collectives import vocabulary_logsumexp
from spmd_tx.sharding.tree_node import TreeNode
from spmd_tx.worker.steps.train import Rows, head_chunks, unchunk


@dataclass(frozen=True)
class Widths:
    """Holds the sizes of a PromptWishes (protocol/commands.py) that select the program."""

    top: int
    draws: int


class ScoreInputs(TreeNode):
    """Holds a PromptWishes (protocol/commands.py) on the device."""

    targets: Any  # int32 [B, T, W]
    seeds: Any  # uint32 [B, T, 2]
    temperatures: Any  # float32 [B, T]


def chunked_scores(
    widths: Widths, logits_of: Callable[[Array], Array], h_BTD: Array, rows: Rows, inputs: ScoreInputs
) -> dict[str, Array]:
    """Compute the reply to a Prefill with wishes, [B, T, ...] by name, without holding all logits.

    Log-probabilities are at temperature 1, from the same function as in training.
    """

    def chunk(some: tuple[Array, Array, Array, ScoreInputs]) -> dict[str, Array]:
        h, targets, positions, inputs = some
        logits = logits_of(h)
        return {
            "logprobs": head.target_logprobs(logits, targets),
            **_top(logits, widths.top),
            **_targets(logits, inputs.targets),
            **_draws(logits, positions, inputs, widths.draws),
        }

    whole = (h_BTD, rows.targets, rows.positions, inputs)
    chunks = lax.map(chunk, jax.tree.map(head_chunks, whole))
    return {name: unchunk(array) for name, array in chunks.items()}


def _top(logits_BTV: Array, count: int) -> dict[str, Array]:
    if not count:
        return {}
    tokens, highest = head.top_logits(logits_BTV, count)
    return {"top_tokens": tokens, "top_logprobs": highest - vocabulary_logsumexp(logits_BTV)[..., None]}


def _targets(logits_BTV: Array, targets_BTW: Array) -> dict[str, Array]:
    if not targets_BTW.shape[-1]:
        return {}
    return {"target_logprobs": head.named_logprobs(logits_BTV, targets_BTW)}


def _draws(logits_BTV: Array, positions_BT: Array, inputs: ScoreInputs, count: int) -> dict[str, Array]:
    """Draw for the token after each position, whose position keys the random numbers."""
    if not count:
        return {}
    b, t, v = logits_BTV.shape
    drawn = draw_several(
        logits_BTV.reshape(b * t, v),
        inputs.seeds.reshape(b * t, 2),
        positions_BT.reshape(b * t) + 1,
        inputs.temperatures.reshape(b * t),
        count,
    ).reshape(b, t, count)
    return {"drawn_tokens": drawn, "drawn_logprobs": head.target_logprobs(logits_BTV, drawn)}
