"""LoRA for one token per row and several adapters at once, for CPUs: each adapter works on its own rows only.

lora.bank_lora multiplies every row by every adapter. That is cheap on an accelerator, which is limited by
reading the adapters. A CPU is limited by arithmetic.

Dimension key as in lora.py; J block of rows, all of one adapter.
"""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from spmd_tx.models.lora import ApplyLora, Lora
from spmd_tx.sharding.collectives import varying

LEAST_ROWS, MOST_ROWS = 8, 16  # rows of a block


def block_rows(rows: int, adapters: int) -> int:
    """Return the rows of a block: an adapter's share of the rows, within bounds.

    Small blocks copy an adapter's factors more often; large ones compute more rows that nobody needs.
    """
    return min(MOST_ROWS, max(LEAST_ROWS, rows // adapters))


def grouped_lora(slots_B: Int[Array, " B"], scale_S: Float[Array, " S"]) -> ApplyLora:
    """Apply its own adapter to each row. Rows are sorted by adapter, and the results put back in order."""
    rows, adapters = slots_B.shape[0], scale_S.shape[0]
    size = block_rows(rows, adapters)
    order_B = jnp.argsort(slots_B)
    place_B = jnp.argsort(order_B)
    counts_S = jnp.sum(slots_B[:, None] == jnp.arange(adapters)[None], axis=0, dtype=jnp.int32)
    starts_S = jnp.cumsum(counts_S) - counts_S
    blocks_S = (counts_S + size - 1) // size
    ends_S = jnp.cumsum(blocks_S)
    numbers_J = jnp.arange(rows // size + adapters)
    slots_J = jnp.sum(numbers_J[:, None] >= ends_S[None], axis=1, dtype=jnp.int32)
    slots_J = jnp.minimum(slots_J, adapters - 1)
    starts_J = starts_S[slots_J] + size * (numbers_J - (ends_S - blocks_S)[slots_J])

    def apply(x_BTI: Array, lora: Lora[Array]) -> Array:
        dtype, (_, t, width_in), width_out = x_BTI.dtype, x_BTI.shape, lora.b.shape[-1]
        spare = ((0, size), (0, 0), (0, 0))  # the last block may extend past the last row
        sorted_BTI = jnp.pad(x_BTI[order_B], spare)

        def block(number: Array, y_BTO: Array) -> Array:
            slot, start = slots_J[number], starts_J[number]
            a_RI, b_RO = (
                lax.dynamic_index_in_dim(x, slot, 0, keepdims=False).astype(dtype) for x in (lora.a, lora.b)
            )
            x_JTI = lax.dynamic_slice(sorted_BTI, (start, 0, 0), (size, t, width_in))
            h_JTR = jnp.einsum("JTI,RI->JTR", x_JTI, a_RI) * scale_S[slot].astype(dtype)
            # Rows of the next adapters are overwritten later by their own blocks.
            return lax.dynamic_update_slice(y_BTO, jnp.einsum("JTR,RO->JTO", h_JTR, b_RO), (start, 0, 0))

        nothing = varying(jnp.zeros((rows + size, t, width_out), dtype))
        return lax.fori_loop(0, ends_S[-1], block, nothing)[place_B]

    return apply
