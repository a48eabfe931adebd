"""Reads the rotary position embedding of a config.json."""

from collections.abc import Mapping
from typing import Any

from spmd_tx.models.declared.rope import Linear, Llama3, Rope, Scaling, Yarn
from spmd_tx.models.families.keys import Keys, Refusal, positive


def read_rope(
    keys: Keys, head_width: int, *, rotated: int = 0, share: float = 1.0, is_interleaved: bool = False
) -> Rope:
    """Return the declaration. Transformers 5 nests in rope_parameters what earlier versions wrote flat.

    ``rotated`` is for families whose config.json does not say how many numbers of a head are rotated, and
    ``share`` what part of them it is where a family's config.json says nothing. Raises Refusal.
    """
    given = _parameters(keys)
    theta = _given(given, "rope_theta") or keys.number("rope_theta")
    share = _given(given, "partial_rotary_factor") or keys.number("partial_rotary_factor", share)
    width = rotated or int(head_width * share)
    if not 0 < width <= head_width or width % 2:
        raise Refusal(f"rotates {width} of {head_width} numbers of a head; it must be an even number of them")
    scaling = _scaling(keys, given)
    growth = _given(given, "llama_4_scaling_beta") or 0.0
    return Rope(
        theta=theta,
        width=0 if width == head_width else width,
        scaling=scaling,
        is_interleaved=is_interleaved,
        query_growth=growth,
        query_span=_original_positions(keys, given) if growth else 0,
    )


def _parameters(keys: Keys) -> Mapping[str, Any]:
    given = keys.mapping("rope_parameters")
    if any(isinstance(value, Mapping) for value in given.values()):
        raise Refusal("has rotary embeddings that differ between layers, which is not supported")
    return {**given, **keys.mapping("rope_scaling")}


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
    return Yarn(
        factor=_given(given, "factor") or keys.count("max_position_embeddings") / original,
        original_positions=original,
        fast=_given(given, "beta_fast") or 32.0,
        slow=_given(given, "beta_slow") or 1.0,
        truncate=bool(given.get("truncate", True)),
        attention_factor=_given(given, "attention_factor"),
        mscale=_given(given, "mscale") or 0.0,
        mscale_all_dim=_given(given, "mscale_all_dim") or 0.0,
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
    return positive(f"sets {key} of its rotary embedding", given.get(key))


def _given(given: Mapping[str, Any], key: str) -> float | None:
    """Return such a number, or None where there is none; 0 says the same."""
    return _number(given, key) if given.get(key) else None
