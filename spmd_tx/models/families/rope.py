"""Reads the rotary position embedding of a config.json."""

from collections.abc import Mapping
from typing import Any

from spmd_tx.models.declared.rope import Linear, Llama3, Rope, Scaling, Yarn
from spmd_tx.models.families.keys import Keys, Refusal


def read_rope(
    keys: Keys, head_width: int, *, rotated: int = 0, share: float = 1.0, is_interleaved: bool = False
) -> Rope:
    """Return the declaration. Transformers 5 nests in rope_parameters what earlier versions wrote flat.

    ``rotated`` is for families whose config.json does not say how many numbers of a head are rotated, and
    ``share`` what part of them it is where a family's config.json says nothing. Raises Refusal.
    """
    given = _parameters(keys)
    theta = given.get("rope_theta") or keys.need("rope_theta")
    share = given.get("partial_rotary_factor") or keys.get("partial_rotary_factor") or share
    width = rotated or int(head_width * share)
    if not 0 < width <= head_width or width % 2:
        raise Refusal(f"rotates {width} of {head_width} numbers of a head; it must be an even number of them")
    scaling = _scaling(keys, given)
    growth = float(given.get("llama_4_scaling_beta") or 0.0)
    return Rope(
        theta=float(theta),
        width=0 if width == head_width else width,
        scaling=scaling,
        is_interleaved=is_interleaved,
        query_growth=growth,
        query_span=_original_positions(keys, given) if growth else 0,
    )


def _parameters(keys: Keys) -> Mapping[str, Any]:
    given = keys.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in given.values()):
        raise Refusal("has rotary embeddings that differ between layers, which is not supported")
    return {**given, **(keys.get("rope_scaling") or {})}


def _scaling(keys: Keys, given: Mapping[str, Any]) -> Scaling | None:
    kind = given.get("rope_type") or given.get("type") or "default"
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise Refusal(
            f"sets the type of its rotary embedding to {kind!r}, which is not supported; supported are "
            "default, linear, llama3 and yarn"
        )
    original = _original_positions(keys, given)
    if kind == "yarn":
        return _yarn(keys, given, original)
    factor = _number(given, "factor")
    if kind == "linear":
        return Linear(factor)
    low, high = _number(given, "low_freq_factor"), _number(given, "high_freq_factor")
    if low > high:
        raise Refusal(
            f"has a low_freq_factor of {low:g} in its rotary embedding, above high_freq_factor {high:g}"
        )
    return Llama3(factor, low, high, original)


def _yarn(keys: Keys, given: Mapping[str, Any], original: int) -> Yarn:
    """Without a factor, it is how many times more positions the model has than at first."""
    factor = given.get("factor") or keys.count("max_position_embeddings") / original
    attention_factor = given.get("attention_factor")
    return Yarn(
        factor=_number({"factor": factor}, "factor"),
        original_positions=original,
        fast=float(given.get("beta_fast") or 32.0),
        slow=float(given.get("beta_slow") or 1.0),
        truncate=bool(given.get("truncate", True)),
        attention_factor=None if attention_factor is None else float(attention_factor),
        mscale=float(given.get("mscale") or 0.0),
        mscale_all_dim=float(given.get("mscale_all_dim") or 0.0),
    )


def _original_positions(keys: Keys, given: Mapping[str, Any]) -> int:
    """Return the positions before scaling; some models have them outside, and then they count."""
    found = (
        keys.get("original_max_position_embeddings")
        or given.get("original_max_position_embeddings")
        or keys.count("max_position_embeddings")
    )
    if not isinstance(found, int) or found < 1:
        raise Refusal(f"sets original_max_position_embeddings to {found!r}, which must be a positive integer")
    return found


def _number(given: Mapping[str, Any], key: str) -> float:
    """Return a number that frequencies or positions are divided by."""
    value = given.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise Refusal(f"sets {key} of its rotary embedding to {value!r}, which must be a positive number")
    return float(value)
