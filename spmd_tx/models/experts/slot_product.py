"""Multiplies pairs by the factors of their slots, which are read where those of all slots stand.

Where a row has one token, nearly every pair is a block of its own. To take each block's factors out of
their stack would move factors for each position, and XLA for TPUs writes them before it multiplies. So each
tile of pairs is multiplied by the factors that all slots have for its expert, by the kernel that multiplies
by the experts' own matrices. Adapters are finite, so another slot's adds exactly zero.

Dimension key as in grouped.py; M tile, S slot.
"""

from typing import cast

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from spmd_tx.models.experts.layout import Tiling
from spmd_tx.models.experts.product import grouped_product
from spmd_tx.protocol.kernels import Kernels

SHARE = 2  # least positions for each expert and slot: with fewer, taking factors out moves less


def is_best(kernels: Kernels, tiling: Tiling, experts: int, slots: int) -> bool:
    """Say whether factors are best read in place, for pairs of one device with ``experts`` experts."""
    return kernels.products == "mosaic" and tiling.block == 1 and SHARE * experts * slots <= tiling.chunk


def slot_product(
    kernels: Kernels,
    narrows: bool,
    x_PI: Float[Array, "P _"],
    factor_XSQI: Float[Array, "X S Q I"],
    slot_P: Int[Array, " P"],
    expert_M: Int[Array, " M"],
) -> Float[Array, "P _"]:
    """Multiply pairs by factors: to their rank with ``narrows``, else from it ([X, S, Q, O])."""
    experts, slots, rank, width = factor_XSQI.shape
    stack = factor_XSQI.reshape(experts, slots * rank, width)
    is_its_PS1 = (slot_P[:, None] == jnp.arange(slots)[None])[..., None]
    if narrows:
        low_PQ = cast(Array, grouped_product(kernels, x_PI, stack, expert_M, True))
        return jnp.sum(jnp.where(is_its_PS1, low_PQ.reshape(-1, slots, rank), 0), axis=1)
    low_PSQ = jnp.where(is_its_PS1, x_PI[:, None], 0)
    return cast(Array, grouped_product(kernels, low_PSQ.reshape(-1, slots * rank), stack, expert_M))
