"""Follows the tokens of one sample through its grammar. Pure.

What comes out does not depend on how many tokens are drawn before they are checked, nor on which masks were
sent: a token is refused or not, and a refused one is drawn again among those that are allowed. So how far a
model is trusted to keep to the grammar, and which masks are guessed, only decides how fast it goes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
from llguidance import LLMatcher

from spmd_tx.coordinator.grammar.likely_masks import LikelyMasks
from spmd_tx.coordinator.grammar.refusals import refusal
from spmd_tx.errors import InvalidRequest

TRUSTED = 16  # tokens drawn without a mask; from here on Decodes need not wait for what the last one drew
MOST_WARY = 256  # tokens that a model has to keep to the grammar by itself, before it is trusted again
LOOSE = 0.99  # share of the vocabulary that free text allows, and the inside of a format does not
WORD = 32  # tokens of one word of a mask


class Guide:
    """Holds the state of one sample's grammar, which is a function of its tokens."""

    def __init__(
        self,
        matcher: LLMatcher,
        stops: Collection[int],
        vocab_size: int,
        likely: LikelyMasks,
        *,
        is_cautious: bool = False,
    ) -> None:
        """``stops`` are the tokens that end the sample, allowed wherever the grammar may end.

        If it ``is_cautious``, a refused token costs more than a step, so that masks are sent from the start,
        and none that is only likely.
        """
        self._matcher, self._stops, self._vocab_size = matcher, sorted(stops), vocab_size
        self._stop_bits = _bits_of(self._stops, vocab_size)
        self._likely, self._is_cautious = likely, is_cautious
        self.forced: list[bool] = []  # of each token that was taken: whether no other one was possible
        # The next tokens, if only one text is possible; the matcher is behind them.
        self.ahead: list[int] = []
        self.is_trusted = True  # whether the next tokens are drawn without masks
        self.reach = TRUSTED  # how many tokens behind those ahead are likely to be allowed
        self.likely_masks: list[np.ndarray] = []  # of the tokens behind those ahead; the first one is certain
        self._obeyed = 0  # the last so many free tokens needed no mask
        self._wary = TRUSTED  # how many of them it takes to be trusted
        self._mask: np.ndarray | None = None
        self._look_ahead()
        self._prepare()

    @property
    def most_draws(self) -> int:
        """How many tokens behind those ahead may be drawn before they are checked."""
        return self.reach if self._is_cautious else TRUSTED

    def take(
        self, tokens: Sequence[int], masks: Sequence[np.ndarray] = (), redrawn: Sequence[bool] = ()
    ) -> int:
        """Follow drawn tokens; return how many are allowed. Raises InvalidRequest.

        ``masks`` are those that were sent, for the tokens behind those ahead, and ``redrawn`` says of each
        token whether its mask had it drawn again.
        """
        offset, was_trusted, free, allowed = len(self.ahead), self.is_trusted, 0, 0
        for place, token in enumerate(tokens):
            is_free, is_redrawn = not self.ahead, bool(redrawn) and redrawn[place]
            if is_free and is_redrawn and not np.array_equal(masks[place - offset], self.mask()):
                break
            mask = self.mask() if is_free and not self.is_trusted else None
            if not self._follow(token):
                self._refuse()
                break
            allowed += 1
            if is_free:
                free += 1
                self._obeyed = 0 if is_redrawn else self._obeyed + 1
            if mask is not None and not self.ahead:
                self._likely.note(mask, self.mask())
        self.reach = min(TRUSTED, self.reach + 2 if allowed == len(tokens) else (self.reach + free + 1) // 2)
        if not was_trusted and self._obeyed >= self._wary:
            self.is_trusted, self._obeyed = True, 0
        self._prepare()
        return allowed

    def _refuse(self) -> None:
        """Note that the model does not keep to the grammar by itself."""
        if self.is_trusted:
            had_earned_it = self._obeyed >= self._wary
            self._wary = max(TRUSTED, self._wary // 2) if had_earned_it else min(MOST_WARY, 2 * self._wary)
        self.is_trusted, self._obeyed = False, 0

    def _prepare(self) -> None:
        """Know how the next tokens are drawn, and now whether their masks can be computed."""
        if self._is_cautious:
            is_loose = not self.ahead and int(np.bitwise_count(self.mask()).sum()) > LOOSE * self._vocab_size
            self.is_trusted, self.reach = is_loose, TRUSTED if is_loose else 1
        self.likely_masks = [] if self.is_trusted else self._likely.behind(self.mask(), self.most_draws)

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
            raise InvalidRequest(refusal(self._matcher.get_error()))

    def mask(self) -> np.ndarray:
        """Return the tokens that are allowed behind those ahead, a bit for each, in words of 32."""
        if self._mask is None:
            words = len(self._stop_bits)
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)[:words]
            self._check()
            if len(bits) < words:
                bits = np.pad(bits, (0, words - len(bits)))
            may_end = self._matcher.is_accepting()
            self._mask = bits | self._stop_bits if may_end else bits & ~self._stop_bits
        return self._mask


def _bits_of(tokens: Iterable[int], vocab_size: int) -> np.ndarray:
    """Return a mask of these tokens."""
    mask = np.zeros(-(-vocab_size // WORD), np.uint32)
    for token in tokens:
        mask[token // WORD] |= np.uint32(1 << token % WORD)
    return mask
