"""Finds the largest of few numbers by comparing all with all, where sorting them costs more."""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

Largest = tuple[Float[Array, "*N K"], Int[Array, "*N K"]]


def top_k(values: Float[Array, "*N X"], count: int) -> Largest:
    """Return the largest values, descending, and their places; ties go to the lower place.

    It is ``jax.lax.top_k``, but NaN ranks below every number, and accelerators compare all X² pairs instead
    of sorting. So X should be hundreds at most.
    """

    def by_sorting(ordered: Array) -> Largest:
        best, places = lax.top_k(ordered, count)
        return best, places

    ordered = jnp.where(jnp.isnan(values), -jnp.inf, values)
    return lax.platform_dependent(ordered, cpu=by_sorting, default=lambda each: by_ranks(each, count))


def by_ranks(values: Float[Array, "*N X"], count: int) -> Largest:
    """Return what ``top_k`` does. The place of a value is the number of others that come before it."""
    *rows, width = values.shape
    last = len(rows)
    mine, other = values[..., :, None], values[..., None, :]
    pairs = (*rows, width, width)
    my_place, other_place = (lax.broadcasted_iota(jnp.int32, pairs, axis) for axis in (last, last + 1))
    ranks = jnp.sum((other > mine) | ((other == mine) & (other_place < my_place)), axis=-1)
    found = (*rows, count, width)
    is_at = ranks[..., None, :] == lax.broadcasted_iota(jnp.int32, found, last)  # one of each row
    best = jnp.sum(jnp.where(is_at, other, 0.0), axis=-1)
    return best, jnp.sum(jnp.where(is_at, lax.broadcasted_iota(jnp.int32, found, last + 1), 0), axis=-1)
