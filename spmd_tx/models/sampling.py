"""Drawing tokens from logits: no sort, one uniform number per token.

Dimension key: B row, V vocabulary, K block of the vocabulary.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int, UInt

from spmd_tx.sharding.mesh import TP

BLOCK = 512  # vocabulary entries per block of the two-level inverse CDF
BISECTIONS = 32
LOWEST = -60.0  # nats below the most likely token; less likely tokens never survive a filter


def draw(
    logits_BV: Float[Array, "B V"],
    seeds_B2: UInt[Array, "B 2"],
    positions_B: Int[Array, " B"],
    temperatures_B: Float[Array, " B"],
    top_k_B: Int[Array, " B"],
    top_p_B: Float[Array, " B"],
) -> tuple[Int[Array, " B"], Float[Array, " B"]]:
    """Draw one token per row; its log-probability is that of softmax(logits / temperature), unfiltered.

    Temperature 0 takes the most likely token and reports its log-probability at temperature 1. The draw
    depends on the row's own logits, seed and position only. Ties at the threshold of top_k or top_p are kept.
    """
    is_greedy_B = temperatures_B <= 0
    # The division comes last: a logit over a tiny temperature could be infinite, and inf - inf is NaN.
    below_BV = logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True)  # nats below the most likely token
    below_BV = below_BV / jnp.where(is_greedy_B, 1.0, temperatures_B)[:, None]
    filters_B = ~is_greedy_B & ((top_k_B < logits_BV.shape[-1]) | (top_p_B < 1))
    no_floor_B = jnp.full_like(temperatures_B, -jnp.inf)
    floor_B = lax.cond(jnp.any(filters_B), lambda: _floor(below_BV, top_k_B, top_p_B), lambda: no_floor_B)
    kept_BV = jnp.where(below_BV > floor_B[:, None], jnp.exp(below_BV), 0.0)
    drawn_B = _inverse_cdf(kept_BV, _uniform(seeds_B2, positions_B))
    token_B = jnp.where(is_greedy_B, jnp.argmax(logits_BV, axis=-1).astype(jnp.int32), drawn_B)
    log_total_B = jnp.log(jnp.sum(jnp.exp(below_BV), axis=-1))
    return token_B, jnp.take_along_axis(below_BV, token_B[:, None], axis=-1)[:, 0] - log_total_B


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
    last = lax.axis_size(TP) * part - 1
    mine_B = jnp.where(highest_B == peak_B, first + jnp.argmax(logits_BV, axis=-1), last)
    greedy_B = lax.pmin(mine_B.astype(jnp.int32), TP)
    return jnp.where(is_greedy_B[:, None], greedy_B[:, None], token_BC)


def _several_uniforms(seeds_B2: Array, positions_B: Array, count: int) -> Array:
    """Return [B, C] in [0, 1), a function of seed, position and draw number."""

    def one(seed: Array, position: Array, number: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed[0]), seed[1]), position)
        return jax.random.uniform(jax.random.fold_in(key, number))

    for_all = jax.vmap(jax.vmap(one, in_axes=(None, None, 0)), in_axes=(0, 0, None))
    return for_all(seeds_B2, positions_B, jnp.arange(count))


def _uniform(seeds_B2: Array, positions_B: Array) -> Array:
    """Return [B] in [0, 1), a function of seed and position."""

    def one(seed: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed[0]), seed[1]), position)
        return jax.random.uniform(key)

    return jax.vmap(one)(seeds_B2, positions_B)


def _floor(below_BV: Array, top_k_B: Array, top_p_B: Array) -> Array:
    """Return the value above which tokens are kept by top_k, then by top_p of the rest; by bisection."""
    vocabulary = below_BV.shape[-1]
    mass_BV = jnp.exp(below_BV)

    def bisect(is_too_small: Callable[[Array], Array]) -> Array:
        def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
            low_B, high_B = bounds
            middle_B = (low_B + high_B) / 2
            too_small_B = is_too_small(middle_B)
            return jnp.where(too_small_B, low_B, middle_B), jnp.where(too_small_B, middle_B, high_B)

        low_B = jnp.full_like(below_BV[:, 0], LOWEST)
        return lax.fori_loop(0, BISECTIONS, halve, (low_B, jnp.zeros_like(low_B)))[0]

    by_count_B = bisect(lambda t: jnp.sum(below_BV > t[:, None], axis=-1, dtype=jnp.int32) < top_k_B)
    by_count_B = jnp.where(top_k_B < vocabulary, by_count_B, -jnp.inf)
    left_BV = jnp.where(below_BV > by_count_B[:, None], mass_BV, 0.0)
    wanted_B = top_p_B * jnp.sum(left_BV, axis=-1)
    by_mass_B = bisect(lambda t: jnp.sum(jnp.where(below_BV > t[:, None], left_BV, 0.0), axis=-1) < wanted_B)
    return jnp.maximum(by_count_B, jnp.where(top_p_B < 1, by_mass_B, -jnp.inf))


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
