"""Feed-forward blocks of long rows run part by part, so that a layer's intermediates of a part only are held.

Dimension key as in backbone.py; N part of the rows.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from spmd_tx.models.remat import rematerialised

PART_TOKENS = 8192  # of a row; products of fewer are hardly slower, and of more not faster
WHOLE_LEVELS = ("none", "light")  # of remat.REMAT_LEVELS: they keep what would be computed again in parts

# (factors, tokens [B, T, D], choices to replay [B, T, C]) -> (sum [B, T, D], chosen experts [B, T, C])
FeedForward = Callable[[Any, Array, Array | None], tuple[Array, Array | None]]


def parts_of(length: int, level: str | None) -> int:
    """Return in how many parts rows of so many tokens run, in a pass of this level; None: without gradients.

    They follow from the rows' length alone, never from their number.
    """
    if level is None or level in WHOLE_LEVELS:
        return 1
    parts = -(-length // PART_TOKENS)
    while length % parts:
        parts += 1
    return parts


def in_parts(
    run: FeedForward, parts: int, level: str, factors: Any, h_BTD: Array, replayed_BTC: Array | None
) -> tuple[Array, Array | None]:
    """Return what ``run`` returns for all tokens; the gradient of ``factors`` is summed in fp32."""
    dtypes = jax.tree.map(lambda x: x.dtype, factors)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), factors)

    def one(part: tuple[Array, Array | None]) -> tuple[Array, Array | None]:
        return run(jax.tree.map(lambda x, dtype: x.astype(dtype), wide, dtypes), *part)

    y_NBTD, choices_NBTC = lax.map(rematerialised(one, level), _cut((h_BTD, replayed_BTC), parts))
    return _joined((y_NBTD, choices_NBTC))


def _cut(arrays: Any, parts: int) -> Any:
    """[B, T, ...] -> [N, B, T / N, ...]"""
    return jax.tree.map(lambda x: x.reshape(x.shape[0], parts, -1, *x.shape[2:]).swapaxes(0, 1), arrays)


def _joined(arrays: Any) -> Any:
    """Undo _cut."""
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(x.shape[1], -1, *x.shape[3:]), arrays)
