"""Stop tokens and stop strings: decides where a sample ends. Pure.

A sample ends with the first token that is a stop token or completes a stop string. It includes that token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from spmd_tx.coordinator.text.token_texts import HALF_CHARACTER
from spmd_tx.protocol.commands import STOP_TOKENS

MOST_OPEN = 3  # most tokens of an incomplete character: each has a byte at least, and four complete it
CONTEXT = 4  # tokens on which the text of the next one may depend


class Decoder(Protocol):
    """What is used of ``tokenizers.Tokenizer``."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True)
class StopRule:
    """Says what ends the samples of one request, besides their number of tokens."""

    tokens: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()

    @cached_property
    def device_tokens(self) -> list[int]:
        """As many stop tokens as the device can check, padded with -1."""
        checked = sorted(self.tokens)[:STOP_TOKENS]
        return checked + [-1] * (STOP_TOKENS - len(checked))


def stop_rule(stop: str | Sequence[str | int] | None, end_of_text: Sequence[int]) -> StopRule:
    """Return a request's rule. The model's end-of-text tokens count only if ``stop`` is None."""
    if stop is None:
        return StopRule(tokens=frozenset(end_of_text))
    stops = [stop] if isinstance(stop, str) else stop
    return StopRule(
        tokens=frozenset(each for each in stops if isinstance(each, int)),
        strings=tuple(each for each in stops if isinstance(each, str) and each),
    )


class StopWatch:
    """Watches the tokens of one sample as they come. Each is decoded a constant number of times."""

    def __init__(self, rule: StopRule, decoder: Decoder | None) -> None:
        self._rule = rule
        self._decoder = decoder
        self._longest = max(map(len, rule.strings), default=0)
        self._text = ""  # the last characters, with which a string may have begun
        self._before: list[int] = []  # the last tokens of this text: some texts depend on those before
        self._length_before = 0  # characters of their text
        self._open: list[int] = []  # later tokens, which may end with half a character

    def end(self, tokens: Sequence[int]) -> int | None:
        """Return how many of the next tokens belong to the sample; None: all, and it continues."""
        if self._rule.tokens.isdisjoint(tokens):
            return self._string_end(tokens) if self._rule.strings else None
        count = next(n for n, token in enumerate(tokens, start=1) if token in self._rule.tokens)
        return (self._string_end(tokens[:count]) if self._rule.strings else None) or count

    def _string_end(self, tokens: Sequence[int]) -> int | None:
        all_open = [*self._open, *tokens]
        text = self._next_text(all_open)
        if self._contains_string(text):
            return self._first_completing(tokens)
        self._settle(all_open, text)
        return None

    def _first_completing(self, tokens: Sequence[int]) -> int:
        """Find the completing token by bisection: text only grows with more tokens."""
        low, high = 1, len(tokens)
        while low < high:
            middle = (low + high) // 2
            if self._contains_string(self._next_text([*self._open, *tokens[:middle]])):
                high = middle
            else:
                low = middle + 1
        return low

    def _contains_string(self, text: str) -> bool:
        whole = self._text + text
        return any(string in whole for string in self._rule.strings)

    def _settle(self, tokens: list[int], text: str) -> None:
        """Keep the text of the tokens, except the last ones if they end with half a character."""
        certain = tokens
        for kept in range(1, MOST_OPEN + 1):
            if not text.endswith(HALF_CHARACTER):
                break
            certain = tokens[: max(0, len(tokens) - kept)]
            text = self._next_text(certain)
        self._text = (self._text + text)[-max(1, self._longest - 1) :]
        self._before = [*self._before, *certain][-CONTEXT:]
        self._length_before = len(self._decode(self._before))
        self._open = tokens[len(certain) :]

    def _next_text(self, tokens: list[int]) -> str:
        """Return the text that these tokens add."""
        return self._decode([*self._before, *tokens])[self._length_before :]

    def _decode(self, tokens: list[int]) -> str:
        assert self._decoder is not None, "stop strings need a tokenizer"
        return self._decoder.decode(tokens, skip_special_tokens=False)
