"""When a sample ends: the stop tokens and stop strings of a request. Pure.

A sample ends with the token that is a stop token, or that completes a stop string; that token belongs to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from spmd_tx.protocol import STOP_TOKENS


class Decoder(Protocol):
    """What is used of ``tokenizers.Tokenizer``."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True)
class StopRule:
    """What ends the samples of one request, besides their number of tokens."""

    tokens: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()

    @property
    def device_tokens(self) -> list[int]:
        """As many stop tokens as the device can check, filled up with -1."""
        checked = sorted(self.tokens)[:STOP_TOKENS]
        return checked + [-1] * (STOP_TOKENS - len(checked))


def stop_rule(stop: str | Sequence[str | int] | None, end_of_text: Sequence[int]) -> StopRule:
    """The rule of a request; only without any ``stop`` the model's end-of-text tokens count."""
    if stop is None:
        return StopRule(tokens=frozenset(end_of_text))
    stops = [stop] if isinstance(stop, str) else stop
    return StopRule(
        tokens=frozenset(each for each in stops if isinstance(each, int)),
        strings=tuple(each for each in stops if isinstance(each, str) and each),
    )


class StopWatch:
    """Watches the tokens of one sample as they come; each token is looked at once."""

    def __init__(self, rule: StopRule, decoder: Decoder | None) -> None:
        self._rule = rule
        self._decoder = decoder
        # A string of n bytes is spread over at most n tokens that add text; 4 more may add none.
        self._reach = 4 + max((len(string.encode()) for string in rule.strings), default=0)
        self._tail: list[int] = []  # the last tokens: a string may have begun there

    def end(self, tokens: Sequence[int]) -> int | None:
        """How many of these next tokens belong to the sample; None: all, and it goes on."""
        for count, token in enumerate(tokens, start=1):
            if token in self._rule.tokens:
                return self._string_end(tokens[:count]) or count
        return self._string_end(tokens)

    def _string_end(self, tokens: Sequence[int]) -> int | None:
        if not self._rule.strings:
            return None
        text = [*self._tail, *tokens]
        count = self._first_completing(text, len(tokens)) if self._contains_string(text) else None
        self._tail = text[-self._reach :]
        return count

    def _first_completing(self, text: list[int], new: int) -> int:
        """Text only grows by more tokens, so the completing token is found by bisection."""
        low, high = 1, new
        while low < high:
            middle = (low + high) // 2
            if self._contains_string(text[: len(text) - new + middle]):
                high = middle
            else:
                low = middle + 1
        return low

    def _contains_string(self, tokens: list[int]) -> bool:
        assert self._decoder is not None, "stop strings need a tokenizer"
        text = self._decoder.decode(tokens, skip_special_tokens=False)
        return any(string in text for string in self._rule.strings)
