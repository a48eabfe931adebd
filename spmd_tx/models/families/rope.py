"""Reads the rotary position embedding of a config.json."""

import math
from collections.abc import Mapping

from spmd_tx.models.declared.rope import Linear, Llama3, LongRope, Rope, Scaling, Yarn
from spmd_tx.models.families.keys import MOST, ConfigKeys, Refusal

MOST_ROTATED = 2**16  # numbers of a head

# All that is read here, whatever the kind of scaling. Another key would be a kind of its own, or misspelled.
READ = frozenset(
    "rope_type type rope_theta partial_rotary_factor factor original_max_position_embeddings low_freq_factor "
    "high_freq_factor beta_fast beta_slow truncate attention_factor mscale mscale_all_dim "
    "llama_4_scaling_beta short_factor long_factor".split()
)
HARMLESS = frozenset({"mrope_section", "mrope_interleaved", "finetuned"})  # of pictures; where it comes from


def read_rope(
    keys: ConfigKeys, head_width: int, *, rotated: int = 0, share: float = 1.0, is_interleaved: bool = False
) -> Rope:
    """Return the declaration. Transformers 5 nests in rope_parameters what earlier versions wrote flat.

    ``rotated`` is for families whose config.json does not say how many numbers of a head are rotated, and
    ``share`` what part of them it is where a family's config.json says nothing. Raises Refusal.
    """
    rope = _parameters(keys)
    theta = _in(rope, keys, "rope_theta").number("rope_theta")
    if theta <= 1:
        raise Refusal(f"sets rope_theta to {theta:g}, which must be above 1")
    share = _in(rope, keys, "partial_rotary_factor").number("partial_rotary_factor", share)
    if rotated and share != 1:
        raise Refusal(
            f"sets partial_rotary_factor to {share:g}, which must be 1: its qk_rope_head_dim says how many "
            "numbers of a head are rotated"
        )
    width = rotated or int(head_width * share)
    if not 0 < width <= min(head_width, MOST_ROTATED) or width % 2:
        raise Refusal(
            f"rotates {width} of {head_width} numbers of a head; it must be an even number of them, "
            f"{MOST_ROTATED} at most"
        )
    scaling = _scaling(keys, rope, width // 2)
    growth = rope.number("llama_4_scaling_beta", 0.0, may_be_zero=True)
    return Rope(
        theta=theta,
        width=0 if width == head_width else width,
        scaling=scaling,
        is_interleaved=is_interleaved,
        query_growth=growth,
        query_span=_original_positions(keys, rope) if growth else 0,
    )


def _parameters(keys: ConfigKeys) -> ConfigKeys:
    nested = keys.within("rope_parameters").raw
    if any(isinstance(value, Mapping) for value in nested.values()):
        raise Refusal("has rotary embeddings that differ between layers, which is not supported")
    rope = ConfigKeys({**nested, **keys.within("rope_scaling").raw}, " of its rotary embedding")
    for key in rope.raw:
        if rope.has(key) and key not in READ | HARMLESS:
            raise rope.wrong(key, f", which is not known; known are {', '.join(sorted(READ))}")
    return rope


def _in(rope: ConfigKeys, keys: ConfigKeys, key: str) -> ConfigKeys:
    return rope if rope.has(key) else keys


def _scaling(keys: ConfigKeys, rope: ConfigKeys, pairs: int) -> Scaling | None:
    key = "type" if rope.has("type") and not rope.has("rope_type") else "rope_type"
    kind = rope.get(key)
    if kind == "longrope":
        return _long_rope(keys, rope, pairs)
    if rope.has("short_factor"):
        raise rope.wrong(key, ", which has no short_factor; longrope has")
    if kind == "default" or (kind is None and not rope.has("factor")):
        return None
    if kind not in ("linear", "llama3", "yarn"):
        supported = "default, linear, llama3, yarn and longrope"
        raise rope.wrong(key, f", which is not supported; supported are {supported}")
    original = _original_positions(keys, rope)
    if kind == "yarn":
        return _yarn(keys, rope, original)
    factor = rope.number("factor")
    if kind == "linear":
        return Linear(factor)
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low > high:
        raise Refusal(
            f"has a low_freq_factor of {low:g} in its rotary embedding, above high_freq_factor {high:g}"
        )
    return Llama3(factor, low, high, original)


def _long_rope(keys: ConfigKeys, rope: ConfigKeys, pairs: int) -> LongRope:
    """Without a factor, it is how many times more positions the model has than at first."""
    factors, original = rope.numbers("short_factor", pairs), _original_positions(keys, rope)
    growth = rope.number("factor", keys.count("max_position_embeddings") / original)
    amplitude = 1.0 if growth <= 1 or original == 1 else math.sqrt(1 + math.log(growth) / math.log(original))
    return LongRope(factors, original, rope.number("attention_factor", amplitude))


def _yarn(keys: ConfigKeys, rope: ConfigKeys, original: int) -> Yarn:
    """Without a factor, it is how many times more positions the model has than at first."""
    factor = rope.number("factor", keys.count("max_position_embeddings") / original)
    if factor * original > MOST:
        raise Refusal(
            f"has a factor of {factor:g} in its rotary embedding, times {original} positions before scaling; "
            f"it must give {MOST} positions at most"
        )
    fast, slow = rope.number("beta_fast", 32.0), rope.number("beta_slow", 1.0)
    if fast < slow:
        raise Refusal(f"has a beta_fast of {fast:g} in its rotary embedding, below beta_slow {slow:g}")
    return Yarn(
        factor=factor,
        original_positions=original,
        fast=fast,
        slow=slow,
        truncate=rope.flag("truncate", True),
        attention_factor=rope.number("attention_factor") if rope.has("attention_factor") else None,
        mscale=rope.number("mscale", 0.0, may_be_zero=True),
        mscale_all_dim=rope.number("mscale_all_dim", 0.0, may_be_zero=True),
    )


def _original_positions(keys: ConfigKeys, rope: ConfigKeys) -> int:
    """Return the positions before scaling; some models have them outside, and then they count."""
    key = "original_max_position_embeddings"
    outside = keys if keys.has(key) else rope
    return outside.count_or(key, keys.count("max_position_embeddings"))
