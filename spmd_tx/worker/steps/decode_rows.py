"""The rows of a decode: what they are given, and what stays of them on the device.

Dimension key as in sample.py.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from spmd_tx.models.grammar_draw import GrammarRows
from spmd_tx.sharding.mesh import DATA
from spmd_tx.sharding.tree_node import TreeNode


class RowState(TreeNode):
    """Holds what stays on the device between decode dispatches, padded to the maximum number of rows."""

    tokens: Any  # int32 [B]
    positions: Any
    remaining: Any  # 0: dead


class DecodeRows(TreeNode):
    """Holds the rows of a Decode (protocol/commands.py) on the device."""

    source: Any  # int32 [B]
    tokens: Any  # int32 [B]
    positions: Any  # int32 [B]
    remaining: Any  # int32 [B]
    slots: Any  # int32 [B]
    seeds: Any  # uint32 [B, 2]
    temperatures: Any  # float32 [B]
    top_k: Any  # int32 [B]
    top_p: Any  # float32 [B]
    stop_tokens: Any  # int32 [B, 8]
    forced: Any = None  # int32 [B, K]; -1: draw. None: all tokens are drawn
    states: Any = None  # int32 [B]: slots of the rows' states. None: models without states
    masks: Any = None  # uint32 [B, M, W]: tokens that a grammar allows. None: no row has a grammar
    mask_places: Any = None  # int32 [B, K]: which of its masks counts in a step; -1: none
    shifts: Any = None  # int32 [B]: added to positions where rows rotate. None: there are no images
    drafts: Any = None  # int32 [B, D], as in Speculation, and
    depths: Any = None  # int32 [B]. None: no row follows another
    chunk: Any = None  # ChunkTokens that the steps read, too; None: they read none

    def grammar(self, step: Array) -> GrammarRows | None:
        """Return what is said about the tokens of one step; None: nothing. Runs inside shard_map."""
        if self.forced is None:
            return None
        if self.masks is None:
            return GrammarRows(self.forced[:, step])
        place_B = self.mask_places[:, step]
        is_masked_B = place_B >= 0
        any_masked = lax.psum(jnp.sum(is_masked_B, dtype=jnp.int32), DATA) > 0
        masks_BW = jnp.take_along_axis(self.masks, jnp.maximum(place_B, 0)[:, None, None], axis=1)[:, 0]
        return GrammarRows(self.forced[:, step], masks_BW, is_masked_B, any_masked)

    def resume(self, previous: RowState) -> RowState:
        """Return the rows' state: that of row ``source`` before, or for new rows their own fields."""
        is_fresh = self.source < 0
        index = jnp.maximum(self.source, 0)

        def pick(fresh: Array, old: Array) -> Array:
            return jnp.where(is_fresh, fresh, old[index])

        return RowState(
            pick(self.tokens, previous.tokens),
            pick(self.positions, previous.positions),
            pick(self.remaining, previous.remaining),
        )
