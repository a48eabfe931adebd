"""Reads reasoning, content and tool calls out of the text of a choice. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from spmd_tx.coordinator.text.reply_events import Reasoning, ReplyCall, ReplyContent, ReplyReader


@dataclass(frozen=True)
class NumberedCall:
    """A tool call of a choice."""

    index: int
    id: str
    call: ReplyCall


ReplyPart = Reasoning | ReplyContent | NumberedCall


class ReplyProgress:
    """Reads a reply as its tokens come."""

    def __init__(self, reader: ReplyReader, name_call: Callable[[int], str], most_calls: int | None) -> None:
        """``name_call`` returns the id of a call by its number; calls beyond ``most_calls`` are dropped."""
        self.calls = 0
        self.reasoning_tokens = 0
        self._reader, self._name_call, self._most_calls = reader, name_call, most_calls
        self._silent_tokens = 0  # since the last one with which a part of the reply came

    def read(self, texts: Sequence[str], *, is_end: bool) -> list[ReplyPart]:
        """Return the parts of the reply that are sure with the texts of further tokens."""
        parts = list[ReplyPart]()
        for text in texts:
            self._silent_tokens += 1
            parts += self._numbered(self._reader.feed(text))
        if is_end:
            parts += self._numbered(self._reader.end())
        return joined(parts)

    def _numbered(self, events: Sequence[Reasoning | ReplyContent | ReplyCall]) -> list[ReplyPart]:
        if any(isinstance(event, Reasoning) for event in events):
            self.reasoning_tokens += self._silent_tokens
        if events:
            self._silent_tokens = 0
        parts = list[ReplyPart]()
        for event in events:
            if not isinstance(event, ReplyCall):
                parts.append(event)
            elif self._most_calls is None or self.calls < self._most_calls:
                parts.append(NumberedCall(self.calls, self._name_call(self.calls), event))
                self.calls += 1
        return parts


def joined(parts: Sequence[ReplyPart]) -> list[ReplyPart]:
    """Return neighbouring texts of one kind as one."""
    found, texts = list[ReplyPart](), list[str]()
    for place, part in enumerate(parts):
        if isinstance(part, NumberedCall):
            found.append(part)
            continue
        texts.append(part.text)
        if place + 1 == len(parts) or type(parts[place + 1]) is not type(part):
            found.append(type(part)("".join(texts)))
            texts.clear()
    return found
