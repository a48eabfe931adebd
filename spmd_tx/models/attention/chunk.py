"""Chunks of prompts that the steps of a decode read beside its rows, a part in each step.

A step's part is like further rows: the maps of all layers take its tokens and those of the rows together, and
so read their weights once. Its tokens attend among themselves, and to what earlier parts have written.

Dimension key as in kv_cache.py; D data shard, C tokens of a chunk, or of its part in one step.
"""

from typing import Any

import jax
from jax import Array, lax

from spmd_tx.protocol.commands import CHUNK_STEPS
from spmd_tx.sharding.tree_node import TreeNode


class ChunkTokens(TreeNode):
    """Holds one prompt's chunk of each data shard, or its part in one step."""

    tokens: Any  # int32 [D, C]
    positions: Any  # int32 [D, C]; -1: padding
    pages: Any  # int32 [D, C]: page of each token; 0 of padding
    slots: Any  # int32 [D]: where the prompt's adapter is
    tables: Any  # int32 [D, N]: pages of the prompt
    following: Any  # int32 [D, C]: the token behind each one; of the last one any

    @property
    def part_tokens(self) -> int:
        """The tokens that one of CHUNK_STEPS steps reads."""
        return self.tokens.shape[1] // CHUNK_STEPS

    def part(self, step: Array) -> "ChunkTokens":
        """Return what one step reads."""
        count = self.part_tokens

        def cut(x_DC: Array) -> Array:
            return lax.dynamic_slice_in_dim(x_DC, step * count, count, axis=1)

        by_token = {name: getattr(self, name) for name in ("tokens", "positions", "pages", "following")}
        return self.replace(**jax.tree.map(cut, by_token))
