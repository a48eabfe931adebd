"""What the backward pass finds of a layer, and what it computes once more (Chen et al. 2016)."""

from collections.abc import Callable
from typing import Any

import jax

from spmd_tx.models.attention.packed_rows import saves_attention
from spmd_tx.models.declared.layers import Layer
from spmd_tx.models.declared.maps import Map
from spmd_tx.models.declared.model import Model, met

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


def computed_twice(model: Model, level: str, tp: int = 1) -> float:
    """Return how many of the numbers that a token meets the backward pass multiplies once more.

    A level keeps the input of a whole cycle of layers, so that all layers of one but the last are computed to
    their ends.
    """
    return sum(
        cycle.repeats * _twice_in_layer(model, layer, level, tp, is_last=position == len(cycle.layers))
        for cycle in model.stack
        for position, layer in enumerate(cycle.layers, start=1)
    )


def _twice_in_layer(model: Model, layer: Layer, level: str, tp: int, *, is_last: bool) -> float:
    ends, again = level != "none" and not is_last, 0.0
    if level == "full" or (level != "none" and layer.mixer.attended is None):  # nothing of it has a name
        again += met(layer.mixer.arrays(model.d_model, ""), tp)
    channel = () if layer.channel is None else layer.channel.arrays(model.d_model, "")
    maps = [array for array in channel if isinstance(array, Map)]
    for each in maps:
        is_down = each.split == "rows"
        if each.experts:  # their own checkpoint computes them again at all levels (experts/moe.py)
            times = int(ends) + int(not is_down)
        else:
            times = int(ends if is_down else level in ("mlp", "full"))
        again += times * each.numbers_met(tp)
    return again
