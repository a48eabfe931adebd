"""Drawing tokens from logits: no sort, one uniform number per token.

Dimension key: B row, V vocabulary, K block of the vocabulary.
"""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int, UInt

from spmd_tx.hlo.hints import USUALLY_FALSE
from spmd_tx.models.grammar_draw import GrammarRows, mass_within
from spmd_tx.sharding.collectives import from_first
from spmd_tx.sharding.mesh import TP

BLOCK = 512  # vocabulary entries per block of the two-level inverse CDF
BISECTIONS = 32
# Bisections for which accelerators read the logits once: XLA puts up to eight sums into one kernel, and these
# take seven. CPUs are limited by arithmetic, and take one at a time.
TOGETHER = 3
FIRST_DRAW, SECOND_DRAW = None, 1  # what is folded into the key of a position's random number
LOWEST = -60.0  # nats below the most likely token; less likely tokens never survive a filter


def draw(
    logits_BV: Float[Array, "B V"],
    seeds_B2: UInt[Array, "B 2"],
    positions_B: Int[Array, " B"],
    temperatures_B: Float[Array, " B"],
    top_k_B: Int[Array, " B"],
    top_p_B: Float[Array, " B"],
    together: int = 1,
    grammar: GrammarRows | None = None,
) -> tuple[Int[Array, " B"], Float[Array, " B"], Bool[Array, " B"] | None]:
    """Draw one token per row; its log-probability is that of softmax(logits / temperature), unfiltered.

    With ``grammar`` the token is one that the row's grammar allows, or the one that it forces; the last array
    says which were drawn again for that, and is None if no row has a mask. Temperature 0
    takes the most likely token and reports its log-probability at temperature 1. The draw depends on the
    row's own logits, seed and position only. Ties at the threshold of top_k or top_p are kept.
    ``together`` is how many bisections read the logits once; the result is the same.
    """
    is_greedy_B = temperatures_B <= 0
    # The division comes last: a logit over a tiny temperature could be infinite, and inf - inf is NaN.
    nats_BV = logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True)  # below the most likely token
    below_BV = nats_BV / jnp.where(is_greedy_B, 1.0, temperatures_B)[:, None]
    has_filter_B = filters(temperatures_B, top_k_B, top_p_B, logits_BV.shape[-1])
    no_floor_B = jnp.full_like(temperatures_B, -jnp.inf)

    def floor() -> Array:
        return _floor(below_BV, top_k_B, top_p_B, together)

    with jax.named_scope(USUALLY_FALSE):
        floor_B = lax.cond(jnp.any(has_filter_B), floor, lambda: no_floor_B)
    kept_BV = jnp.where(below_BV > floor_B[:, None], jnp.exp(below_BV), 0.0)
    drawn_B = _inverse_cdf(kept_BV, _uniform(seeds_B2, positions_B))
    token_B = jnp.where(is_greedy_B, jnp.argmax(logits_BV, axis=-1).astype(jnp.int32), drawn_B)
    log_total_B = jnp.log(jnp.sum(jnp.exp(below_BV), axis=-1))
    is_redrawn_B = None
    if grammar is not None:

        def redraw() -> Array:
            allowed_BV = grammar.allowed(0, logits_BV.shape[-1])
            within_BV = mass_within(nats_BV, below_BV > floor_B[:, None], allowed_BV, temperatures_B)
            again_B = _inverse_cdf(within_BV, _uniform(seeds_B2, positions_B, SECOND_DRAW))
            likeliest_B = jnp.argmax(jnp.where(allowed_BV, nats_BV, -jnp.inf), axis=-1).astype(jnp.int32)
            return jnp.where(is_greedy_B, likeliest_B, again_B)

        token_B, is_redrawn_B = grammar.settle(token_B, redraw, together=False)
    logprob_B = jnp.take_along_axis(below_BV, token_B[:, None], axis=-1)[:, 0] - log_total_B
    return token_B, logprob_B, is_redrawn_B


def filters(temperatures_B: Array, top_k_B: Array, top_p_B: Array, vocabulary: int) -> Array:
    """Return which rows leave out tokens by top_k or top_p."""
    return (temperatures_B > 0) & ((top_k_B < vocabulary) | (top_p_B < 1))


def draw_split(
    logits_BV: Float[Array, "B V"],
    seeds_B2: UInt[Array, "B 2"],
    positions_B: Int[Array, " B"],
    temperatures_B: Float[Array, " B"],
    top_k_B: Int[Array, " B"],
    top_p_B: Float[Array, " B"],
    any_filters: Array,
    grammar: GrammarRows | None = None,
) -> tuple[Int[Array, " B"], Float[Array, " B"], Bool[Array, " B"] | None, Float[Array, " B"]]:
    """Return what ``draw`` does, and the logarithm of the total mass, with the vocabulary split over tp.

    Devices exchange some numbers per row instead of logits, and all of them return the same token, even if
    they round differently. ``any_filters``, the same on all devices, says whether any row has ``filters``.
    """
    part, size = logits_BV.shape[-1], lax.axis_size(TP)
    first = lax.axis_index(TP) * part
    highest_B = jnp.max(logits_BV, axis=-1)
    peak_B = lax.pmax(highest_B, TP)
    is_greedy_B = temperatures_B <= 0
    nats_BV = logits_BV - peak_B[:, None]
    below_BV = nats_BV / jnp.where(is_greedy_B, 1.0, temperatures_B)[:, None]

    def floor() -> Array:
        return _floor(below_BV, top_k_B, top_p_B, TOGETHER, lambda x: lax.psum(x, TP), part * size)

    with jax.named_scope(USUALLY_FALSE):
        floor_B = lax.cond(any_filters, floor, lambda: jnp.full_like(temperatures_B, -jnp.inf))
    mass_BV = jnp.exp(below_BV)
    kept_BV = jnp.where(below_BV > floor_B[:, None], mass_BV, 0.0)
    sums_B2 = jnp.stack([jnp.sum(kept_BV, axis=-1), jnp.sum(mass_BV, axis=-1)], axis=-1)
    sums_BS2 = lax.all_gather(sums_B2, TP, axis=1, to="invarying")
    drawn_B = _split_inverse_cdf(kept_BV, sums_BS2[..., 0], _uniform(seeds_B2, positions_B))
    greedy_B = _split_argmax(logits_BV, highest_B == peak_B)
    token_B = jnp.where(is_greedy_B, greedy_B, drawn_B)
    is_redrawn_B = None
    if grammar is not None:

        def redraw() -> Array:
            allowed_BV = grammar.allowed(first, part)
            kept = below_BV > floor_B[:, None]
            within_BV = mass_within(nats_BV, kept, allowed_BV, temperatures_B, lambda x: lax.pmax(x, TP))
            within_BS = lax.all_gather(jnp.sum(within_BV, axis=-1), TP, axis=1, to="invarying")
            uniform_B = _uniform(seeds_B2, positions_B, SECOND_DRAW)
            again_B = _split_inverse_cdf(within_BV, within_BS, uniform_B)
            left_BV = jnp.where(allowed_BV, logits_BV, -jnp.inf)
            highest_left_B = jnp.max(left_BV, axis=-1)
            likeliest_B = _split_argmax(left_BV, highest_left_B == lax.pmax(highest_left_B, TP))
            return jnp.where(is_greedy_B, likeliest_B, again_B)

        token_B, is_redrawn_B = grammar.settle(token_B, redraw, together=True)
    here_B = token_B - first
    is_here_B = (here_B >= 0) & (here_B < part)
    chosen_B = jnp.take_along_axis(below_BV, jnp.where(is_here_B, here_B, 0)[:, None], axis=-1)[:, 0]
    log_total_B = jnp.log(jnp.sum(sums_BS2[..., 1], axis=1))
    logprob_B = lax.psum(jnp.where(is_here_B, chosen_B, 0.0), TP) - log_total_B
    return token_B, logprob_B, is_redrawn_B, log_total_B


def _split_inverse_cdf(mass_BV: Array, masses_BS: Array, uniform_B: Array) -> Array:
    """Return what ``_inverse_cdf`` does, from all devices' parts; ``masses_BS`` are their sums."""
    device_B, share_B = _device_of(masses_BS, uniform_B)
    device_B = from_first(device_B, TP)
    token_B = lax.axis_index(TP) * mass_BV.shape[-1] + _inverse_cdf(mass_BV, share_B)
    return lax.psum(jnp.where(device_B == lax.axis_index(TP), token_B, 0), TP)


def _device_of(masses_BS: Array, uniform_B: Array) -> tuple[Array, Array]:
    """Return whose part the uniform share of the total mass falls into, and its share of that part's mass."""
    running_BS = jnp.cumsum(masses_BS, axis=1)
    wanted_B = uniform_B * running_BS[:, -1]
    device_B = jnp.sum(running_BS <= wanted_B[:, None], axis=-1, dtype=jnp.int32)
    # Rounding may end behind the last part; the one with the most mass is always allowed.
    most_B = jnp.argmax(masses_BS, axis=1).astype(jnp.int32)
    device_B = jnp.where(device_B < masses_BS.shape[1], device_B, most_B)
    mass_B = jnp.take_along_axis(masses_BS, device_B[:, None], axis=1)[:, 0]
    behind_B = jnp.take_along_axis(running_BS, device_B[:, None], axis=1)[:, 0] - wanted_B
    return device_B, jnp.clip(1 - behind_B / mass_B, 0.0, 1.0)


def _split_argmax(logits_BV: Array, has_peak_B: Array) -> Array:
    """Return the first of the most likely tokens; ``has_peak_B``: whether one is in this device's part."""
    part = logits_BV.shape[-1]
    mine_B = lax.axis_index(TP) * part + jnp.argmax(logits_BV, axis=-1)
    last = lax.axis_size(TP) * part - 1
    return lax.pmin(jnp.where(has_peak_B, mine_B, last).astype(jnp.int32), TP)


def tempered_by(
    top_BK: Float[Array, "B K"], temperatures_B: Float[Array, " B"], log_total_B: Float[Array, " B"]
) -> Float[Array, "B K"]:
    """Turn the highest logits into log-probabilities, equal to those of ``draw_split`` bit for bit."""
    scale_B1 = jnp.where(temperatures_B <= 0, 1.0, temperatures_B)[:, None]
    return (top_BK - top_BK[:, :1]) / scale_B1 - log_total_B[:, None]


def tempered(
    top_BK: Float[Array, "B K"], logits_BV: Float[Array, "B V"], temperatures_B: Float[Array, " B"]
) -> Float[Array, "B K"]:
    """Turn the highest logits into log-probabilities, equal to those of ``draw`` bit for bit."""
    scale_B1 = jnp.where(temperatures_B <= 0, 1.0, temperatures_B)[:, None]
    below_BV = (logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True)) / scale_B1
    log_total_B = jnp.log(jnp.sum(jnp.exp(below_BV), axis=-1))
    return (top_BK - top_BK[:, :1]) / scale_B1 - log_total_B[:, None]


def draw_several(
    logits_BV: Float[Array, "B V"],
    seeds_B2: UInt[Array, "B 2"],
    positions_B: Int[Array, " B"],
    temperatures_B: Float[Array, " B"],
    count: int,
) -> Int[Array, "B C"]:
    """Draw independent tokens per row from softmax(logits / temperature), with the vocabulary split over tp.

    Draw number c of a row depends on its logits, seed, position and c only. Temperature 0 takes the most
    likely token every time.
    """
    part = logits_BV.shape[-1]
    first = lax.axis_index(TP) * part
    highest_B = jnp.max(logits_BV, axis=-1)
    peak_B = lax.pmax(highest_B, TP)
    is_greedy_B = temperatures_B <= 0
    below_BV = (logits_BV - peak_B[:, None]) / jnp.where(is_greedy_B, 1.0, temperatures_B)[:, None]
    mass_BV = jnp.exp(below_BV)
    masses_BS = lax.all_gather(jnp.sum(mass_BV, axis=-1), TP, axis=1, to="invarying")  # of each device
    running_BS = jnp.cumsum(masses_BS, axis=1)
    wanted_BC = _several_uniforms(seeds_B2, positions_B, count) * running_BS[:, -1:]
    device_BC = jnp.sum(running_BS[:, None] <= wanted_BC[:, :, None], axis=-1, dtype=jnp.int32)
    device_BC = jnp.minimum(device_BC, masses_BS.shape[1] - 1)
    mass_BC = jnp.take_along_axis(masses_BS, device_BC, axis=1)
    share_BC = 1 - (jnp.take_along_axis(running_BS, device_BC, axis=1) - wanted_BC) / mass_BC
    find = jax.vmap(_inverse_cdf, in_axes=(None, 1), out_axes=1)
    local_BC = find(mass_BV, jnp.clip(share_BC, 0.0, 1.0))
    token_BC = lax.psum(jnp.where(device_BC == lax.axis_index(TP), first + local_BC, 0), TP)
    greedy_B = _split_argmax(logits_BV, highest_B == peak_B)
    return jnp.where(is_greedy_B[:, None], greedy_B[:, None], token_BC)


def _several_uniforms(seeds_B2: Array, positions_B: Array, count: int) -> Array:
    """Return [B, C] in [0, 1), a function of seed, position and draw number."""

    def one(seed: Array, position: Array, number: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed[0]), seed[1]), position)
        return jax.random.uniform(jax.random.fold_in(key, number))

    for_all = jax.vmap(jax.vmap(one, in_axes=(None, None, 0)), in_axes=(0, 0, None))
    return for_all(seeds_B2, positions_B, jnp.arange(count))


def _uniform(seeds_B2: Array, positions_B: Array, draw_number: int | None = FIRST_DRAW) -> Array:
    """Return [B] in [0, 1), a function of seed, position and which of the position's draws it is for."""

    def one(seed: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed[0]), seed[1]), position)
        return jax.random.uniform(key if draw_number is None else jax.random.fold_in(key, draw_number))

    return jax.vmap(one)(seeds_B2, positions_B)


def _floor(
    below_BV: Array,
    top_k_B: Array,
    top_p_B: Array,
    together: int,
    total: Callable[[Array], Array] = lambda sums_BM: sums_BM,
    vocabulary: int = 0,
) -> Array:
    """Return the value above which tokens are kept by top_k, then by top_p of the rest; by bisection.

    With a vocabulary split over devices, ``total`` adds their sums, and ``vocabulary`` is its whole size.
    """
    vocabulary = vocabulary or below_BV.shape[-1]
    mass_BV = jnp.exp(below_BV)

    def bisect(sum_above: Callable[[Array], Array], wanted_B: Array) -> Array:
        def narrow(levels: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
            sums_BM = total(jnp.stack([sum_above(middle_B) for middle_B in _middles(*bounds, levels)], -1))
            is_too_small_MB = jnp.moveaxis(sums_BM < wanted_B[:, None], 1, 0)
            return _narrowed(*bounds, iter(is_too_small_MB), levels)

        turns, rest = divmod(BISECTIONS, together)
        low_B = jnp.full_like(top_p_B, LOWEST)
        bounds = lax.fori_loop(0, turns, lambda _, b: narrow(together, b), (low_B, jnp.zeros_like(low_B)))
        return (narrow(rest, bounds) if rest else bounds)[0]

    by_count_B = bisect(lambda t: jnp.sum(below_BV > t[:, None], axis=-1, dtype=jnp.int32), top_k_B)
    by_count_B = jnp.where(top_k_B < vocabulary, by_count_B, -jnp.inf)
    left_BV = jnp.where(below_BV > by_count_B[:, None], mass_BV, 0.0)
    wanted_B = top_p_B * total(jnp.sum(left_BV, axis=-1))
    by_mass_B = bisect(lambda t: jnp.sum(jnp.where(below_BV > t[:, None], left_BV, 0.0), axis=-1), wanted_B)
    return jnp.maximum(by_count_B, jnp.where(top_p_B < 1, by_mass_B, -jnp.inf))


def _middles(low_B: Array, high_B: Array, levels: int) -> list[Array]:
    """Return what so many bisections may ask for: the middle, then of the lower half, then of the upper."""
    if not levels:
        return []
    middle_B = (low_B + high_B) / 2
    return [middle_B, *_middles(low_B, middle_B, levels - 1), *_middles(middle_B, high_B, levels - 1)]


def _narrowed(low_B: Array, high_B: Array, is_too_small: Iterator[Array], levels: int) -> tuple[Array, Array]:
    """Return the bounds after so many bisections, from what was found of each of ``_middles``."""
    if not levels:
        return low_B, high_B
    middle_B, too_small_B = (low_B + high_B) / 2, next(is_too_small)
    lower = _narrowed(low_B, middle_B, is_too_small, levels - 1)
    upper = _narrowed(middle_B, high_B, is_too_small, levels - 1)
    return jax.tree.map(lambda one, other: jnp.where(too_small_B, one, other), lower, upper)


def _inverse_cdf(mass_BV: Array, uniform_B: Array) -> Array:
    """Return the first token whose running mass exceeds the uniform share of the total, in two levels."""
    b, vocabulary = mass_BV.shape
    mass_BKV = jnp.pad(mass_BV, ((0, 0), (0, -vocabulary % BLOCK))).reshape(b, -1, BLOCK)
    running_BK = jnp.cumsum(jnp.sum(mass_BKV, axis=-1), axis=-1)
    wanted_B = uniform_B * running_BK[:, -1]
    block_B = jnp.minimum(
        jnp.sum(running_BK <= wanted_B[:, None], axis=-1, dtype=jnp.int32), running_BK.shape[1] - 1
    )
    before_B = jnp.where(
        block_B > 0, jnp.take_along_axis(running_BK, jnp.maximum(block_B - 1, 0)[:, None], axis=1)[:, 0], 0.0
    )
    inside_BV = jnp.cumsum(jnp.take_along_axis(mass_BKV, block_B[:, None, None], axis=1)[:, 0], axis=-1)
    place_B = jnp.sum(before_B[:, None] + inside_BV <= wanted_B[:, None], axis=-1, dtype=jnp.int32)
    token_B = jnp.minimum(block_B * BLOCK + place_B, vocabulary - 1)
    # Rounding may end on a token without mass; the most likely one is always allowed.
    has_mass_B = jnp.take_along_axis(mass_BV, token_B[:, None], axis=1)[:, 0] > 0
    return jnp.where(has_mass_B, token_B, jnp.argmax(mass_BV, axis=-1).astype(jnp.int32))
