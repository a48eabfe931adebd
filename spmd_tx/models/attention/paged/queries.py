"""What kernels have in common: how queries are arranged for them, and what they tell XLA of their cost.

Dimension key as in kv_cache.py; G query heads per key-value head, R queries of a key-value head.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jaxtyping import Float, Int

from spmd_tx.models.attention.page_loop import USUAL_TOKENS

LOWEST = -1e30  # finite, not -inf: rows of pure padding must stay finite


def by_head(q_BTNE: Float[Array, "B T N E"], heads: int, multiple: int) -> Float[Array, "B K R E"]:
    """Put the queries of each key-value head together, token by token; zeros at the end."""
    b, t, n, e = q_BTNE.shape
    q_BKRE = q_BTNE.reshape(b, t, heads, n // heads, e).swapaxes(1, 2).reshape(b, heads, -1, e)
    return jnp.pad(q_BKRE, ((0, 0), (0, 0), (0, -q_BKRE.shape[2] % multiple), (0, 0)))


def positions_by_head(positions_BT: Int[Array, "B T"], group: int, multiple: int) -> Int[Array, "B R"]:
    """Return the position of each query of ``by_head``; -1 for those that were put in."""
    positions_BR = jnp.repeat(positions_BT, group, axis=1)
    padding = -positions_BR.shape[1] % multiple
    return jnp.pad(positions_BR, ((0, 0), (0, padding)), constant_values=-1)


def sinks_by_head(sinks_N: Float[Array, " N"], heads: int, count: int) -> Float[Array, "K R"]:
    """Return the sink of each of ``count`` queries of ``by_head``, in fp32."""
    sinks_KG = sinks_N.astype(jnp.float32).reshape(heads, -1)
    return jnp.tile(sinks_KG, (1, -(-count // sinks_KG.shape[1])))[:, :count]


def by_token(y_BKRE: Float[Array, "B K R E"], tokens: int, group: int) -> Float[Array, "B T N E"]:
    """Undo ``by_head``."""
    b, heads, _, e = y_BKRE.shape
    y_BKTGE = y_BKRE[:, :, : tokens * group].reshape(b, heads, tokens, group, e)
    return y_BKTGE.swapaxes(1, 2).reshape(b, tokens, heads * group, e)


def estimate(
    q_BTNE: Array, pools: Sequence[Array], most_tokens: int, window: int, whole: Sequence[Array]
) -> pl.CostEstimate:
    """Estimate the cost of rows with USUAL_TOKENS each, or with as many as their tables or a window hold.

    ``whole`` are the arrays that are read or written as wholes, beside pages of the pools.
    """
    b, t, _, e = q_BTNE.shape
    seen = b * min(USUAL_TOKENS, most_tokens, *((window + t,) if window else ()))
    products = 4 * q_BTNE.size // b * seen
    read = sum(seen * pool.shape[3] * pool.dtype.itemsize for pool in pools)
    return pl.CostEstimate(
        flops=products,
        transcendentals=products // (4 * e),
        bytes_accessed=read + sum(array.nbytes for array in whole),
    )
