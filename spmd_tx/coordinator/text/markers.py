"""Finds literal markers in a text that comes in pieces, in time linear in its length. Pure."""

import functools
import re

PROMPT_TAIL = 256  # characters; no marker is longer


def tail(prompt: str, blanks: str) -> str:
    """Return the end of a prompt, without blanks; it may say what the answer begins in."""
    return prompt[-PROMPT_TAIL:].rstrip(blanks)


class Markers:
    """Holds texts to look for. None is the beginning of another, nor part of it."""

    def __init__(self, *texts: str) -> None:
        self.pattern = re.compile("|".join(map(re.escape, texts)) if texts else r"(?!)")
        self.beginnings = frozenset(text[:length] for text in texts for length in range(1, len(text)))
        self.longest_beginning = max(map(len, self.beginnings), default=0)


@functools.lru_cache(maxsize=256)
def markers(*texts: str) -> Markers:
    """Return them compiled; the same formats look for the same markers all the time."""
    return Markers(*texts)


class MarkerScanner:
    """Splits a text at markers. A piece that may begin a marker waits for what follows."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0  # what is before has been returned

    def add(self, text: str) -> None:
        """Append a piece of the text."""
        self._text += text

    def put_back(self, text: str) -> None:
        """Put text in front of what is left."""
        self._text, self._at = text + self._text[self._at :], 0

    def next(self, wanted: Markers) -> tuple[str, str]:
        """Return the text before the next marker, and the marker; "" if none is there yet."""
        match = wanted.pattern.search(self._text, self._at)
        if match is not None:
            before = self._text[self._at : match.start()]
            self._at = match.end()
            return before, match[0]
        end = len(self._text)
        for length in range(min(wanted.longest_beginning, end - self._at), 0, -1):
            if self._text[-length:] in wanted.beginnings:
                end -= length
                break
        before, self._text, self._at = self._text[self._at : end], self._text[end:], 0
        return before, ""

    def rest(self) -> str:
        """Return what waits; nothing follows it any more."""
        rest, self._text, self._at = self._text[self._at :], "", 0
        return rest
