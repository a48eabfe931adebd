"""Gated DeltaNet in a decode whose rows follow others: a row goes on from the state after the row before it.

Every row leaves its state in a slot of its own, so what was read behind a wrong draft changes no other state.
Memories are read in turn: first those of leaders, then those of the rows behind them, and so on, all by the
same loop, so that a row's bits do not depend on how many rows are before it. Nor may they depend on where a
row finds what it goes on from. So it is taken from one array: for a choice between two, LLVM makes several
loops, which may round a sum of products in several ways.

Dimension key as in delta_layer.py, with one token per row; N inputs of all rows.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from spmd_tx.models.linear_attention import delta_memory
from spmd_tx.models.linear_attention.delta_memory import InPool

# (memories before a token, or where they are) -> (results [B, H, V], memories after it, or their pool)
ReadMemories = Callable[[Any], tuple[Array, Array]]


def inputs_before(
    kept_BJC: Float[Array, "B _ C"], read_BC: Float[Array, "B C"], depths_B: Int[Array, " B"]
) -> Float[Array, "B _ C"]:
    """Return the convolution's last inputs before each row's token.

    ``kept_BJC`` are those before the leaders' tokens, and ``read_BC`` the inputs of all tokens.
    """
    rows, count, channels = kept_BJC.shape
    leaders_B1 = (jnp.arange(rows) - depths_B)[:, None]
    place_BJ = depths_B[:, None] + jnp.arange(count)[None]  # among those kept, and those read behind them
    kept_NC = kept_BJC.reshape(rows * count, channels)
    all_NC = jnp.concatenate([kept_NC, read_BC.astype(kept_NC.dtype)])
    behind_BJ = len(kept_NC) + leaders_B1 + place_BJ - count
    return all_NC[jnp.where(place_BJ < count, leaders_B1 * count + place_BJ, behind_BJ)]


def read_in_turn(
    read: ReadMemories, memory: Any, depths_B: Int[Array, " B"], v_BHV: Array
) -> tuple[Array, Array]:
    """Read one token per row, those of followers after those of the rows before them.

    ``v_BHV`` are the tokens' values, of the results' shape. Returns what ``read`` returns for all rows.
    """
    in_pool = memory if isinstance(memory, InPool) else None
    before_B = jnp.arange(depths_B.size) - jnp.minimum(depths_B, 1)

    def turn(depth: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        o_BHV, kept = carry
        is_its_B = depths_B == depth
        if in_pool is not None:
            found, after = read(_of_turn(in_pool.replace(pool=kept), before_B, is_its_B))
        else:
            found, after = read(kept[before_B])
            after = jnp.where(_wide(is_its_B, kept), after, kept)
        return jnp.where(_wide(is_its_B, found), found, o_BHV), after

    begin = v_BHV.astype(jnp.float32), memory if in_pool is None else in_pool.pool
    return lax.fori_loop(0, 1 + jnp.max(depths_B), turn, begin)


def _of_turn(memory: InPool, before_B: Array, is_its_B: Array) -> InPool:
    """Let rows find what the rows before them have left; those whose turn it is not leave nothing."""
    targets_B = jnp.where(is_its_B, memory.targets_B, delta_memory.NOTHING)
    return memory.replace(sources_B=memory.sources_B[before_B], targets_B=targets_B)


def _wide(is_B: Array, like: Array) -> Array:
    return is_B.reshape(-1, *[1] * (like.ndim - 1))
