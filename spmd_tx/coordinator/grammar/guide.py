"""Follows the tokens of one sample through its grammar. Pure.

What comes out does not depend on how many tokens are drawn before they are checked, nor on which masks were
sent: a token is refused or not, and a refused one is drawn again among those that are allowed. So how far a
model is trusted to keep to the grammar only decides how fast it goes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from llguidance import LLMatcher

from spmd_tx.errors import InvalidRequest

TRUSTED = 16  # tokens drawn without a mask; from here on Decodes need not wait for what the last one drew
LOOSE = 0.99  # share of the vocabulary that free text allows, and the inside of a format does not
WORD = 32  # tokens of one word of a mask


class Guide:
    """Holds the state of one sample's grammar, which is a function of its tokens."""

    def __init__(
        self, matcher: LLMatcher, stops: Collection[int], vocab_size: int, *, is_cautious: bool = False
    ) -> None:
        """``stops`` are the tokens that end the sample, allowed wherever the grammar may end.

        If it ``is_cautious``, a refused token costs more than a step, so that masks are sent from the start.
        """
        self._matcher, self._stops, self._vocab_size = matcher, sorted(stops), vocab_size
        self._is_cautious = is_cautious
        self.forced: list[bool] = []  # of each token that was taken: whether no other one was possible
        # The next tokens, if only one text is possible; the matcher is behind them.
        self.ahead: list[int] = []
        # How many tokens behind those ahead are drawn before they are checked.
        self.reach = TRUSTED
        self._mask: np.ndarray | None = None
        self._look_ahead()
        self._set_reach(self._reach_by_mask() if is_cautious else TRUSTED)

    @property
    def is_trusted(self) -> bool:
        """Whether the next tokens are drawn without masks."""
        return self.reach >= TRUSTED

    def take(self, tokens: Sequence[int]) -> int:
        """Follow drawn tokens; return how many are allowed. Raises InvalidRequest."""
        known = len(self.forced)
        allowed = next((count for count, token in enumerate(tokens) if not self._follow(token)), len(tokens))
        if allowed == len(tokens):
            self._set_reach(self._reach_by_mask() if self._is_cautious else 2 * self.reach)
            return allowed
        free = sum(not is_forced for is_forced in self.forced[known:])
        # Less than what is trusted: the same token comes again unless there is a mask.
        self._set_reach(1 if self._is_cautious else min(TRUSTED - 1, free // 2))
        return allowed

    def _set_reach(self, tokens: int) -> None:
        self.reach = max(1, min(TRUSTED, tokens))
        if not self.is_trusted:
            self.mask()  # what cannot be computed is known now, and not when a Decode is planned

    def _reach_by_mask(self) -> int:
        """Trust free text alone."""
        is_loose = not self.ahead and int(np.bitwise_count(self.mask()).sum()) > LOOSE * self._vocab_size
        return TRUSTED if is_loose else 1

    def _follow(self, token: int) -> bool:
        if self.ahead:
            if token != self.ahead[0]:
                return False
            del self.ahead[0]
            self.forced.append(True)
            if not self.ahead:
                self._look_ahead()
            return True
        if token in self._stops:
            is_allowed = self._matcher.is_accepting()
        else:
            is_allowed = bool(self._matcher.try_consume_tokens([token]))
        if is_allowed:
            self.forced.append(False)
            self._look_ahead()
        self._check()
        return is_allowed

    def _look_ahead(self) -> None:
        """Take what can only go on in one way."""
        self._mask = None
        self.ahead = self._matcher.compute_ff_tokens()
        if self.ahead:
            self._matcher.consume_tokens(self.ahead)
        elif self._matcher.is_stopped() and len(self._stops) == 1:
            self.ahead = list(self._stops)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise InvalidRequest(
                f"the grammar of the answer cannot be followed: {self._matcher.get_error()[:200]}; send a "
                "simpler schema or grammar"
            )

    def mask(self) -> np.ndarray:
        """Return the tokens that are allowed behind those ahead, a bit for each, in words of 32."""
        if self._mask is None:
            words = -(-self._vocab_size // WORD)
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
            self._check()
            mask = np.zeros(words, np.uint32)
            mask[: min(words, len(bits))] = bits[:words]
            for stop in self._stops:
                bit = np.uint32(1 << stop % WORD)
                if self._matcher.is_accepting():
                    mask[stop // WORD] |= bit
                else:
                    mask[stop // WORD] &= ~bit
            self._mask = mask
        return self._mask
