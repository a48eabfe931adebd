"""Keys and values of layers whose tokens see a window, of the sequences being sampled.

Such a layer keeps no pages: a sequence has one slot of the states (state_pool.py), which holds its last
tokens as a ring. Position p is at place p modulo the ring's length, so a token's keys and values replace
those that no later token sees. A ring is longer than the window by at least MOST_FOLLOWERS tokens: where a
decode reads drafts, those that turn out to be wrong have replaced nothing that is still seen, and are
replaced themselves before anybody sees them.

Dimension key: L layer with a window, P slot (of one data shard), W place in a ring, X all key-value heads
side by side, B row, T token, S place or token, N heads, K key-value heads, E head width.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Int
from msgspec.structs import replace

from spmd_tx.models.attention.kv_cache import KvCache, write
from spmd_tx.models.attention.packed_rows import segment_attention
from spmd_tx.models.attention.paged.attention import paged_attention, takes
from spmd_tx.models.declared.mixers import Softmax
from spmd_tx.models.forward_pass import Attend, StateSlots
from spmd_tx.protocol.commands import MOST_FOLLOWERS
from spmd_tx.protocol.kernels import Kernels
from spmd_tx.sharding.mesh import DATA, TP, AnyMesh
from spmd_tx.sharding.weight import Weight

NOTHING = 0  # the slot that is never written
PAGE = 16  # tokens that are read as a page


def length_of(window: int) -> int:
    """Return the tokens that a ring holds, whole pages."""
    return -(-(window + MOST_FOLLOWERS) // PAGE) * PAGE


def ring_weights(mixer: Softmax, mesh: AnyMesh, lead: tuple[int, int], dtype: DTypeLike) -> KvCache:
    """Declare rings [L, P, W, X], ``lead`` being layers and the slots of all data shards."""
    heads = max(mixer.kv_heads, mesh.shape[TP])  # with fewer heads than tp, each device keeps its own
    pool = Weight((*lead, length_of(mixer.window), heads * mixer.width), P(None, DATA, None, TP), dtype)
    return KvCache(pool, pool)


def prefill_attend(
    kernels: Kernels,
    window: int,
    segments_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
    slots: StateSlots,
) -> Attend:
    """Attend as in training, and leave every row's last tokens in its ring.

    Each row has one segment, which begins at position 0.
    """
    attention = segment_attention(kernels, segments_BT)
    slots_BT = _slots_of_last(window, segments_BT, positions_BT, slots)
    places_BT = positions_BT % length_of(window)

    def attend(
        index: Array, q: Array, k: Array, v: Array, rings: KvCache, **sight: Any
    ) -> tuple[Array, KvCache]:
        return attention(q, k, v, **sight), write(rings, index, slots_BT, places_BT, k, v)

    return attend


def continue_attend(
    kernels: Kernels,
    window: int,
    segments_BT: Int[Array, "B T"],
    positions_BT: Int[Array, "B T"],
    slots: StateSlots,
) -> Attend:
    """Put what a row's ring holds in front of its tokens, attend, and leave its last tokens in the ring.

    The whole is attended to as pages.
    """
    (b, t), length = positions_BT.shape, length_of(window)
    first_B1 = positions_BT[:, :1]
    count_B1 = jnp.minimum(first_B1, window)  # tokens in the ring that are in front
    place_S = jnp.arange(-(-(window + t) // PAGE) * PAGE, dtype=positions_BT.dtype)[None]
    in_ring_BS = (first_B1 - count_B1 + place_S) % length
    in_row_BS = length + jnp.clip(place_S - count_B1, 0, t - 1)
    order_BS1 = jnp.where(place_S < count_B1, in_ring_BS, in_row_BS)[..., None]
    tables_BN = jnp.arange(b * place_S.size // PAGE, dtype=jnp.int32).reshape(b, -1)
    near_BT = jnp.where(segments_BT > 0, positions_BT - first_B1 + count_B1, -1)
    slots_BT = _slots_of_last(window, segments_BT, positions_BT, slots)

    def attend(
        index: Array, q: Array, k: Array, v: Array, rings: KvCache, **sight: Any
    ) -> tuple[Array, KvCache]:
        def paged(ring: Array, new: Array) -> Array:
            both = jnp.concatenate(
                [ring[index, slots.sources_B], new.reshape(b, t, -1).astype(ring.dtype)], 1
            )
            return jnp.take_along_axis(both, order_BS1, axis=1).reshape(1, -1, PAGE, both.shape[2])

        pools = paged(rings.keys, k), paged(rings.values, v)
        y = paged_attention(_taking(kernels, q), q, pools, jnp.int32(0), tables_BN, near_BT, **sight)
        return y, write(rings, index, slots_BT, positions_BT % length, k, v)

    return attend


def _slots_of_last(window: int, segments_BT: Array, positions_BT: Array, slots: StateSlots) -> Array:
    """Return the slots of the tokens that a row leaves in its ring; NOTHING for the others."""
    last_B1 = jnp.max(jnp.where(segments_BT > 0, positions_BT, -1), axis=1, keepdims=True)
    is_kept_BT = (segments_BT > 0) & (positions_BT > last_B1 - window)
    return jnp.where(is_kept_BT, slots.targets_B[:, None], NOTHING)


def decode_attend(
    kernels: Kernels, window: int, slots: StateSlots, positions_B: Int[Array, " B"], is_alive_B: Array
) -> Attend:
    """Write one token per row, then attend to what the row's ring holds.

    Rows that follow another one have its slot. Positions are counted from a multiple of the ring's length,
    and its pages are those before and after the next one: what they hold of tokens that are out of sight is
    masked by the positions there.
    """
    length = length_of(window)
    pages_BN = slots.sources_B[:, None] * (length // PAGE) + jnp.arange(length // PAGE)[None]
    tables_BN = jnp.concatenate([pages_BN, pages_BN], axis=1).astype(jnp.int32)
    pages = 1 << (tables_BN.shape[1] - 1).bit_length()  # which kernels want, and would make in each layer
    tables_BN = jnp.pad(tables_BN, ((0, 0), (0, pages - tables_BN.shape[1])))
    near_B = jnp.where(positions_B < length, positions_B, length + positions_B % length)
    last_B1 = jnp.where(is_alive_B, near_B, -1)[:, None]

    def attend(
        index: Array, q: Array, k: Array, v: Array, rings: KvCache, **sight: Any
    ) -> tuple[Array, KvCache]:
        rings = write(rings, index, slots.targets_B, positions_B % length, k[:, 0], v[:, 0])
        layers, *_, width = rings.keys.shape
        pools = tuple(pool.reshape(layers, -1, PAGE, width) for pool in (rings.keys, rings.values))
        return paged_attention(_taking(kernels, q), q, pools, index, tables_BN, last_B1, **sight), rings

    return attend


def _taking(kernels: Kernels, q_BTNE: Array) -> Kernels:
    """Return the choice for a ring's pages, which a kernel may not take."""
    is_able = takes(kernels.pages, q_BTNE.shape[-1], PAGE)
    return kernels if is_able else replace(kernels, pages="reference")
