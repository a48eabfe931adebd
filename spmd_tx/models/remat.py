"""What the backward pass finds of a layer, and what it computes once more (Chen et al. 2016)."""

from collections.abc import Callable
from typing import Any

import jax

from spmd_tx.models.attention.packed_rows import saves_attention

# What each level keeps of a layer for the backward pass, besides its input; the rest is recomputed. "mlp"
# keeps attention's operands and results, so the feed-forward block runs twice; "light" recomputes
# elementwise operations only; "none" keeps everything that the backward pass reads.
# "attended" is named in attention/blockwise.py, "low_rank" in row_lora.py, and "expert_low_rank" in moe.py:
# it is all that the backward pass reads of experts that share their outer factors, so that they run once.
ATTENTION_NAMES = ("query", "key", "value", "attended", "after_attention", "low_rank")
REMAT_LEVELS: dict[str, tuple[str, ...] | None] = {
    "none": None,
    "light": (*ATTENTION_NAMES, "gate", "up"),
    "mlp": ATTENTION_NAMES,
    "full": ("expert_low_rank",),
}


def rematerialised(run: Callable[..., Any], level: str) -> Callable[..., Any]:
    """Wrap one layer so that it keeps what a level of REMAT_LEVELS says."""
    names = REMAT_LEVELS[level]
    if names is None:
        return run
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    if "attended" in names:
        policy = jax.checkpoint_policies.save_from_both_policies(policy, saves_attention)
    return jax.checkpoint(run, prevent_cse=False, policy=policy)  # scan already keeps the two passes apart
