"""LoRA for one token per row and several adapters at once, for CPUs: each adapter works on its own rows only.

lora.bank_lora multiplies every row by every adapter. That is cheap on an accelerator, which is limited by
reading the adapters. A CPU is limited by arithmetic. Factors are read where they are in the bank: a copy of
all adapters, or of those of one layer, would cost more than the products.

Dimension key as in lora.py; J block of rows, all of one adapter.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from spmd_tx.models.adapters.lora import Adapters, ApplyLora, Lora, has_experts
from spmd_tx.models.declared.model import Model
from spmd_tx.sharding.collectives import varying
from spmd_tx.sharding.tree_node import static

LEAST_ROWS, MOST_ROWS = 8, 16  # rows of a block


def block_rows(rows: int, adapters: int) -> int:
    """Return the rows of a block: an adapter's share of the rows, within bounds.

    Small blocks copy an adapter's factors more often; large ones compute more rows that nobody needs.
    """
    return min(MOST_ROWS, max(LEAST_ROWS, rows // adapters))


class BankPlace(Lora[Any]):
    """Stands for a map's factors, which stay in the bank."""

    a: Any = None
    b: Any = None
    layer: Any = None  # int32: a number, or those of all layers [L]; None: the map is in no layer
    name: str = static(default="head")  # or a name of Adapters.layers


def places(model: Model, bank: Adapters[Array]) -> Adapters[Any]:
    """Replace the factors of dense maps by their places. Those of experts stay, to be applied otherwise."""

    def place(name: str, factors: Lora[Array]) -> Any:
        if has_experts(model, name):
            return factors
        return BankPlace(layer=jnp.arange(factors.a.shape[0], dtype=jnp.int32), name=name)

    return Adapters({name: place(name, factors) for name, factors in bank.layers.items()}, BankPlace())


def grouped_lora(bank: Adapters[Array], slots_B: Int[Array, " B"], scale_S: Float[Array, " S"]) -> ApplyLora:
    """Apply its own adapter to each row: to rows and a BankPlace.

    Rows are sorted by adapter, and the results put back in order. Slot 0 holds zeros: its rows cost nothing.
    """
    rows, adapters = slots_B.shape[0], scale_S.shape[0]
    size = block_rows(rows, adapters)
    has_adapter_B = slots_B > 0
    slots_B = jnp.where(has_adapter_B, slots_B, adapters)  # the others come last, and no block is for them
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

    def apply(x_BTI: Array, place: BankPlace) -> Array:
        lora = bank.head if place.layer is None else bank.layers[place.name]
        dtype, (_, t, width_in), width_out = x_BTI.dtype, x_BTI.shape, lora.b.shape[-1]
        spare = ((0, size), (0, 0), (0, 0))  # the last block may extend past the last row
        sorted_BTI = jnp.pad(x_BTI[order_B], spare)

        def block(number: Array, y_BTO: Array) -> Array:
            slot, start = slots_J[number], starts_J[number]
            a_RI, b_RO = (_factor(x, place.layer, slot).astype(dtype) for x in (lora.a, lora.b))
            x_JTI = lax.dynamic_slice(sorted_BTI, (start, 0, 0), (size, t, width_in))
            h_JTR = jnp.einsum("JTI,RI->JTR", x_JTI, a_RI) * scale_S[slot].astype(dtype)
            # Rows of the next adapters are overwritten later by their own blocks.
            return lax.dynamic_update_slice(y_BTO, jnp.einsum("JTR,RO->JTO", h_JTR, b_RO), (start, 0, 0))

        nothing = varying(jnp.zeros((rows + size, t, width_out), dtype))
        y_BTO = lax.fori_loop(0, ends_S[-1], block, nothing)[place_B]
        return jnp.where(has_adapter_B[:, None, None], y_BTO, jnp.zeros((), dtype))

    return apply


def _factor(stack: Array, layer: Array | None, slot: Array) -> Array:
    """Return one adapter's factor of a layer [L, S, R, W], or of a map in no layer [S, R, W]."""
    where = (slot,) if layer is None else (layer, slot)
    size = (*[1] * len(where), *stack.shape[-2:])
    return lax.dynamic_slice(stack, (*where, 0, 0), size).reshape(stack.shape[-2:])
