"""Lossless speculation in a decode: rows behind a row read the tokens that are likely to follow its last one.

Every row of a program reads one token of one sequence. A *follower* is a row that reads a draft: a token that
its leader, the row of the sequence, has not drawn yet. In each layer all rows write their keys and values
before any of them attends, so a follower attends to what the rows before it have written. It draws with the
uniform number of its own position, and what it draws counts if every row before it has drawn what the next
one has read. So the tokens of a sequence are those of plain steps, and a row computes what it would compute
alone. Keys and values of a draft that was wrong are overwritten before anybody reads them. A state that every
token changes is left by each row in a slot of its own, and a leader goes on from that of the last row that
counted: the two rows change slots.

Dimension key as in sample.py; D drafts of a row.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from spmd_tx.protocol.commands import REJECTED
from spmd_tx.sharding.tree_node import TreeNode


class Speculation(TreeNode):
    """Says where each row is in the drafts of its sequence. All arrays have a row for each of the program."""

    drafts: Any  # int32 [B, D] of leaders: a text that is likely to follow, perhaps with gaps; -1: its end
    depths: Any  # int32 [B]: how many rows before it the leader is; 0: it is a leader
    places: Any  # int32 [B]: where in its drafts the next token of a leader is likely to be
    previous: Any  # int32 [B]: the token before the last one of a leader; -1: not known
    slots: Any = None  # int32 [B]: where each row leaves its state; rows may share a ring. None: nowhere
    expected: Any = None  # int32 [B]: what the model expects next of leaders; -1: not known. None: of none

    @classmethod
    def begin(
        cls, drafts_BD: Array, depths_B: Array, slots_B: Array | None = None, *, expects: bool = False
    ) -> "Speculation":
        """Expect the first draft of each leader next. ``expects``: the model makes drafts, too."""
        nothing_B = jnp.full_like(depths_B, -1)
        expected_B = nothing_B if expects else None
        return cls(drafts_BD, depths_B, jnp.zeros_like(depths_B), nothing_B, slots_B, expected_B)

    @property
    def leaders(self) -> Array:
        """The row of each row's leader."""
        return jnp.arange(self.depths.shape[0]) - self.depths

    def spread(self, state: Any) -> Any:
        """Return the RowState with what each follower reads in place of its own; -1: it is dead."""
        place_B = self.places[self.leaders] + self.depths - 1
        draft_B = _at(self.drafts[self.leaders], place_B)
        if self.expected is not None:
            draft_B = jnp.where((draft_B < 0) & (self.depths == 1), self.expected[self.leaders], draft_B)
        is_leader_B = self.depths == 0
        remaining_B = jnp.maximum(state.remaining[self.leaders] - self.depths, 0)
        return state.replace(
            tokens=jnp.where(is_leader_B, state.tokens, jnp.maximum(draft_B, 0)),
            positions=state.positions[self.leaders] + self.depths,
            remaining=jnp.where(is_leader_B | (draft_B >= 0), remaining_B, 0),
        )

    def settle(
        self, read: Any, after: Any, tokens_B: Array, expected_B: Array | None = None
    ) -> tuple["Speculation", Any, Array]:
        """Return where the sequences are, their RowState, and the tokens that count.

        ``read`` is the state that ``spread`` has returned, and ``after`` that behind the step, in which each
        row has drawn its token of ``tokens_B``, and the model expects ``expected_B`` behind it.
        """
        is_alive_B = read.remaining > 0
        # A row counts if the one before it does, goes on, and has drawn what this one has read.
        goes_on_B = (jnp.roll(after.remaining, 1) > 0) & (jnp.roll(tokens_B, 1) == read.tokens)
        breaks_B = jnp.cumsum(jnp.where((self.depths > 0) & ~(is_alive_B & goes_on_B), 1, 0))
        counts_B = is_alive_B & (breaks_B == breaks_B[self.leaders])
        drawn_B = jnp.zeros_like(self.depths).at[self.leaders].add(counts_B.astype(jnp.int32))
        last_B = jnp.arange(drawn_B.size) + jnp.maximum(drawn_B - 1, 0)
        state = jax.tree.map(lambda x: x[last_B], after)
        state = state.replace(remaining=jnp.where(self.depths == 0, state.remaining, 0))
        previous_B = read.tokens[last_B]
        places_B = jnp.where(
            drawn_B > 0, self._next_places(state.tokens, previous_B, self.places + drawn_B - 1), self.places
        )
        kept_B = jnp.where(counts_B, tokens_B, jnp.where(is_alive_B, REJECTED, -1))
        slots_B = None if self.slots is None else self.slots[self._exchanged(last_B)]
        expected_B = None if expected_B is None else expected_B[last_B]
        then = {"places": places_B, "previous": previous_B, "slots": slots_B, "expected": expected_B}
        return self.replace(**then), state, kept_B

    def _exchanged(self, last_B: Array) -> Array:
        """Return the rows in an order in which each leader has changed places with its last row."""
        is_last_B = last_B[self.leaders] == jnp.arange(last_B.size)
        return jnp.where(is_last_B, self.leaders, last_B)

    def _next_places(self, tokens_B: Array, previous_B: Array, expected_B: Array) -> Array:
        """Return the places behind the last two tokens in the drafts, next to where the last was expected.

        Where they do not follow each other, the drafts may go on alike behind another token.
        """
        numbers_1D = jnp.arange(self.drafts.shape[1])[None]
        before_BD = jnp.pad(self.drafts[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
        is_last_BD = self.drafts == tokens_B[:, None]
        is_there_BD = is_last_BD & (before_BD == previous_B[:, None])
        is_there_BD |= is_last_BD & (numbers_1D == expected_B[:, None])
        distance_BD = jnp.where(is_there_BD, jnp.abs(numbers_1D - expected_B[:, None]), numbers_1D.size)
        nearest_B = jnp.argmin(distance_BD, axis=1).astype(jnp.int32)
        return jnp.where(jnp.any(is_there_BD, axis=1), nearest_B, expected_B) + 1


def _at(texts_BD: Array, places_B: Array) -> Array:
    """Return a token of each text; -1 beyond its end."""
    is_inside_B = (places_B >= 0) & (places_B < texts_BD.shape[1])
    place_B1 = jnp.where(is_inside_B, places_B, 0)[:, None]
    return jnp.where(is_inside_B, jnp.take_along_axis(texts_BD, place_B1, axis=1)[:, 0], -1)
