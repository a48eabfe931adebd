"""Turns tokens of a sample into text as they come: no half characters, nothing after a stop string. Pure."""

from collections.abc import Sequence

from spmd_tx.coordinator.sampling.request.stops import MOST_OPEN, Decoder
from spmd_tx.coordinator.text.token_texts import HALF_CHARACTER


class Detokenizer:
    """Decodes tokens. A character whose bytes are not all there is held back."""

    def __init__(self, decoder: Decoder, *, shows_special_tokens: bool = False) -> None:
        self._decoder = decoder
        self._skips = not shows_special_tokens
        self._tokens: list[int] = []  # the last ones with text, since some texts depend on what is before
        self._given_out = 0  # how many of these have their text given out

    def add(self, tokens: Sequence[int]) -> str:
        """The text that is certain now."""
        self._tokens += filter(self._has_text, tokens)
        certain = len(self._tokens)
        text = self._text_up_to(certain)
        for open_tokens in range(1, MOST_OPEN + 1):
            if not text.endswith(HALF_CHARACTER):
                break
            certain = max(self._given_out, len(self._tokens) - open_tokens)
            text = self._text_up_to(certain)
        if text:
            self._tokens = self._tokens[self._given_out :]
            self._given_out = certain - self._given_out
        return text

    def end(self) -> str:
        """The text that was held back, if no more tokens come."""
        return self._text_up_to(len(self._tokens))

    def _has_text(self, token: int) -> bool:
        """Return False for tokens that are not shown and unused numbers, which may stand within a character.

        Some decoders drop the space that begins a text, so the token is decoded twice in a row.
        """
        return self._decoder.decode([token, token], skip_special_tokens=self._skips) != ""

    def _text_up_to(self, count: int) -> str:
        before = self._decoder.decode(self._tokens[: self._given_out], skip_special_tokens=self._skips)
        return self._decoder.decode(self._tokens[:count], skip_special_tokens=self._skips)[len(before) :]


class TextUntilStop:
    """Passes text on up to the first stop string. What may be the beginning of one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found: str | None = None  # the stop string that has ended the text

    def add(self, text: str) -> str:
        """The text that is certain now."""
        if self.found is not None:
            return ""
        self._held += text
        places = [(place, stop) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            place, self.found = min(places)
            return self._held[:place]
        certain = len(self._held) - self._beginning_of_a_stop()
        released, self._held = self._held[:certain], self._held[certain:]
        return released

    def end(self) -> str:
        """The text that was held back, if no more text comes."""
        return "" if self.found is not None else self._held

    def _beginning_of_a_stop(self) -> int:
        """How many of the last characters a stop string may begin with."""
        most = min(len(self._held), max(map(len, self._stops), default=1) - 1)
        ends = (self._held[len(self._held) - count :] for count in range(most, 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self._stops)), 0)


class SampleText:
    """Decodes a sample, perhaps behind an echoed prompt, and ends its text at a stop string.

    Nothing in the prompt is a stop string.
    """

    def __init__(
        self,
        decoder: Decoder,
        stops: Sequence[str],
        *,
        prompt_tokens: int = 0,
        shows_special_tokens: bool = False,
    ) -> None:
        self.length = 0  # characters, with those that are held back as they may begin a stop string
        self._left = prompt_tokens  # of the prompt that are still to come
        self._prompt = Detokenizer(decoder)
        self._sample = Detokenizer(decoder, shows_special_tokens=shows_special_tokens)
        self._until_stop = TextUntilStop(stops)

    def add(self, tokens: Sequence[int]) -> str:
        ours, others = tokens[: self._left], tokens[self._left :]
        echoed = self._prompt.add(ours) if ours else ""
        self._left -= len(ours)
        if ours and not self._left:
            echoed += self._prompt.end()
        drawn = self._sample.add(others) if others else ""
        self.length += len(echoed) + len(drawn)
        return echoed + self._until_stop.add(drawn)

    def end(self) -> str:
        return self._until_stop.add(self._sample.end()) + self._until_stop.end()

    @property
    def stop(self) -> str | None:
        """The stop string that has ended the text."""
        return self._until_stop.found
