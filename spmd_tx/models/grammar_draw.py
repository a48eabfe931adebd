"""Drawing within a grammar: a second draw among the allowed tokens where the first one is not allowed.

A token t comes out with p(t) + (1 - Z) p(t) / Z = p(t) / Z, where Z is the mass of the allowed ones: exactly
p restricted to them. And the outcome is the same whether a mask came before the first draw was seen or after
it, so masks may be sent for those tokens only that were refused. A token that was not drawn again is the one
that any other mask with it would have left, so a wrong mask does harm only where it had a token drawn again.

Dimension key: B row, V vocabulary (or a device's part of it), W word of 32 tokens.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Bool, Float, Int

from spmd_tx.sharding.tree_node import TreeNode

WORD = 32  # tokens of one word of a mask


class GrammarRows(TreeNode):
    """Holds what grammars say about the next token of every row."""

    forced: Any  # int32 [B]: the token that is taken whatever is drawn; -1: none
    masks: Any = None  # uint32 [B, W]: a bit for each token, set if it is allowed. None: no row has a mask
    is_masked: Any = None  # bool [B]: whether the mask counts
    any_masked: Any = None  # bool: whether that of any row does; the same on all devices

    def allows(self, token_B: Int[Array, " B"]) -> Bool[Array, " B"]:
        """Say whether the token of each row is in its mask."""
        word_B = jnp.take_along_axis(self.masks, (token_B // WORD)[:, None], axis=1)[:, 0]
        return (word_B >> (token_B % WORD).astype(jnp.uint32)) & 1 > 0

    def allowed(self, first: Array | int, count: int) -> Bool[Array, "B V"]:
        """Unpack the bits of ``count`` tokens from ``first`` on."""
        token_V = first + jnp.arange(count, dtype=jnp.int32)
        words_BV = self.masks[:, token_V // WORD]
        return (words_BV >> (token_V % WORD).astype(jnp.uint32)[None]) & 1 > 0

    def settle(
        self, token_B: Int[Array, " B"], redraw: Callable[[], Array], *, together: bool
    ) -> tuple[Int[Array, " B"], Bool[Array, " B"] | None]:
        """Return each row's token: the drawn one, what ``redraw`` gives in its place, or the forced one.

        Then whether it was drawn again; None: no row has a mask. ``together``: devices exchange numbers to
        draw again, so all of them do, or none.
        """
        if self.masks is None:
            return jnp.where(self.forced >= 0, self.forced, token_B), None
        is_redrawn_B = self.is_masked & ~self.allows(token_B)
        is_needed = self.any_masked if together else jnp.any(is_redrawn_B)
        allowed_B = lax.cond(is_needed, lambda: jnp.where(is_redrawn_B, redraw(), token_B), lambda: token_B)
        return jnp.where(self.forced >= 0, self.forced, allowed_B), is_redrawn_B


def _same(x: Array) -> Array:
    return x


def mass_within(
    nats_BV: Float[Array, "B V"],
    kept_BV: Bool[Array, "B V"],
    allowed_BV: Bool[Array, "B V"],
    temperatures_B: Float[Array, " B"],
    highest: Callable[[Array], Array] = _same,
) -> Float[Array, "B V"]:
    """Return the mass, up to a factor, of the tokens that filters keep and grammars allow.

    If no token is both, that of all that are allowed.

    ``nats_BV`` are log-probabilities at temperature 1, up to a constant of the row. ``highest`` returns the
    highest of all devices' numbers, if the vocabulary is split over them.
    """
    both_BV = kept_BV & allowed_BV
    has_any_B = highest(jnp.any(both_BV, axis=-1).astype(jnp.int32)) > 0
    left_BV = jnp.where(has_any_B[:, None], both_BV, allowed_BV)
    peak_B = highest(jnp.max(jnp.where(left_BV, nats_BV, -jnp.inf), axis=-1))
    # From the likeliest of those that are left: the mass of all of them may be too small for a float.
    scale_B = jnp.where(temperatures_B <= 0, 1.0, temperatures_B)
    return jnp.where(left_BV, jnp.exp((nats_BV - peak_B[:, None]) / scale_B[:, None]), 0.0)
