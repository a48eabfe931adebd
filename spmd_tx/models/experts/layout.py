"""Decides where each pair of a token and one of its experts stands when pairs are grouped by expert.

Positions are divided into blocks, whose pairs all have the same row and the same expert, and into tiles,
whose blocks all have the same expert. Rows stand in the order of their adapters. How a row's pairs are
divided into blocks, and the order of the blocks, follows from that row alone: sums over blocks in this order
do not depend on other rows.

Dimension key: R row of any device of ep, T token, C choice, X expert of this device, S slot,
W position, N block, G group of all pairs with one expert and one slot.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Int

from spmd_tx.sharding.tree_node import TreeNode

MOST_PAIRS = 16  # of a block
TILES, CPU_TILES = (16, 128), (8, 64)  # the least and most pairs of a tile
CHUNKS = 4  # that an equal share of all pairs usually takes, and
SPARE = 1.03  # how much more they have room for
LEAST_CHUNK = 4096  # positions; fewer are one chunk


@dataclass(frozen=True)
class Tiling:
    """Holds how pairs are divided. Each size is a multiple of the one before."""

    block: int  # pairs of one row and one expert
    tile: int  # pairs of one expert
    chunk: int  # pairs that are computed at once
    positions: int  # enough for any choice of experts
    # If all experts are chosen equally often:
    usual_chunks: int = 1
    usual_pairs: int = 0

    def usual_experts(self, local: int) -> int:
        """Return to how many of a device's experts the pairs of a chunk belong; they stand in their order."""
        return -(-(local + self.usual_chunks - 1) // self.usual_chunks)


@dataclass(frozen=True)
class Choices:
    """Counts the rows and experts of one device and its peers in ep."""

    rows: int
    length: int  # tokens of a row
    choices: int  # experts of a token
    experts: int  # of all devices
    local: int  # experts of this device

    @property
    def pairs(self) -> int:
        return self.rows * self.length * self.choices

    def tiling(self, *, by_tile: bool) -> Tiling:
        """Return sizes that follow from the shapes alone. With ``by_tile``, for CPUs, a chunk is one tile."""
        of_row, of_expert = self.length * self.choices // self.experts, self.pairs // self.experts
        block = _power_of_two(of_row // 4, 1, MOST_PAIRS)
        least, most_of_tile = CPU_TILES if by_tile else TILES
        tile = _power_of_two(of_expert if by_tile else of_expert // 8, max(least, block), most_of_tile)
        # A token chooses an expert once, and what does not fill its last block or tile is left free.
        most = self.rows * self.length * min(self.choices, self.local)
        blocks, tiles = min(most, self.rows * self.local), min(most, self.local)
        bound = most + blocks * (block - 1) + tiles * (tile - block)
        share = self.pairs * self.local // self.experts
        free = min(share, self.rows * self.local) * (block - 1) // 2 + tiles * (tile - block) // 2
        usual = int(SPARE * (share + free))
        # Chunks are computed as wholes, so that the usual pairs should fill the last one, too.
        part = -(-usual // min(CHUNKS, max(1, usual // LEAST_CHUNK)))
        chunk = _rounded_up(tile if by_tile else min(bound, part), tile)
        positions = _rounded_up(bound, chunk)
        chunks = -(-min(usual, positions) // chunk)
        return Tiling(block, tile, chunk, positions, usual_chunks=chunks, usual_pairs=share)


def _power_of_two(size: int, least: int, most: int) -> int:
    """Return the largest power of two up to ``size``, within bounds that are powers of two."""
    return min(most, max(least, 1 << max(0, size.bit_length() - 1)))


def _rounded_up(count: int, step: int) -> int:
    return -(-count // step) * step


class Layout(TreeNode):
    """Holds the places of pairs on this device."""

    place_RTC: Any  # int32: where the pair stands; -1: with another device, or it is no pair
    pair_W: Any  # int32: the number of the pair, counted over [R, T, C], that stands there; -1: none
    expert_N: Any  # int32: the expert of a block; of a free one, that of the last block in use
    slot_N: Any  # int32
    group_N: Any  # int32
    first_G: Any  # int32: the first block of all pairs with expert g // S and slot g % S
    count_G: Any  # int32: how many blocks there are
    positions: Any  # int32: how many are in use, in whole tiles


def layout(
    tiling: Tiling, chosen_RTC: Int[Array, "R T C"], slots_R: Int[Array, " R"], local: int, slots: int
) -> Layout:
    """Place the pairs whose expert lies in [0, local); a token's other entries are no pairs.

    A token must not have an expert twice. ``slots`` is the number of adapters.
    """
    block, width = tiling.block, tiling.positions
    numbers_X = jnp.arange(local, dtype=jnp.int32)
    is_its_RTCX = chosen_RTC[..., None] == numbers_X[None, None, None]
    seen_RTX = jnp.cumsum(jnp.any(is_its_RTCX, axis=2), axis=1, dtype=jnp.int32)
    blocks_RX = (seen_RTX[:, -1] + block - 1) // block

    rows = jnp.arange(slots_R.shape[0])
    is_less_RR = (slots_R[None] < slots_R[:, None]) | (
        (slots_R[None] == slots_R[:, None]) & (rows[None] < rows[:, None])
    )
    before_RX = _sum(jnp.where(is_less_RR[..., None], blocks_RX[None], 0), 1)
    total_X = _sum(blocks_RX, 0)
    per_tile = tiling.tile // block
    ends_X = jnp.cumsum((total_X + per_tile - 1) // per_tile * per_tile, dtype=jnp.int32)
    starts_X = ends_X - (total_X + per_tile - 1) // per_tile * per_tile

    start_RX = (starts_X[None] + before_RX) * block
    place_RTX = start_RX[:, None] + seen_RTX - 1
    place_RTC = _sum(jnp.where(is_its_RTCX, place_RTX[:, :, None], 0), 3)
    is_mine_RTC = jnp.any(is_its_RTCX, axis=3)
    pairs = jnp.arange(chosen_RTC.size, dtype=jnp.int32)
    # Pairs of others go to places of their own beyond the end, so that no two are equal.
    targets = jnp.where(is_mine_RTC.reshape(-1), place_RTC.reshape(-1), width + pairs)
    empty_W = jnp.full(width, -1, jnp.int32)
    pair_W = empty_W.at[targets].set(pairs, mode="drop", unique_indices=True)

    number_N = jnp.arange(width // block, dtype=jnp.int32)
    expert_N = jnp.minimum(_sum(number_N[:, None] >= ends_X[None], 1), local - 1)
    of_token = chosen_RTC.shape[1] * chosen_RTC.shape[2]
    slot_N = jnp.where(pair_W[::block] >= 0, slots_R[pair_W[::block] // of_token], 0).astype(jnp.int32)

    is_its_RS = slots_R[:, None] == jnp.arange(slots, dtype=slots_R.dtype)[None]
    count_XS = _sum(jnp.where(is_its_RS[:, None], blocks_RX[..., None], 0), 0)
    first_XS = starts_X[:, None] + jnp.cumsum(count_XS, axis=1, dtype=jnp.int32) - count_XS
    return Layout(
        place_RTC=jnp.where(is_mine_RTC, place_RTC, -1),
        pair_W=pair_W,
        expert_N=expert_N,
        slot_N=slot_N,
        group_N=expert_N * slots + slot_N,
        first_G=first_XS.reshape(-1),
        count_G=count_XS.reshape(-1),
        positions=ends_X[-1] * block,
    )


def _sum(x: Array, axis: int) -> Array:
    return jnp.sum(x, axis=axis, dtype=jnp.int32)
