"""Reads reasoning, content and tool calls out of the text of a choice, and writes its message. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import UNSET

from spmd_tx.coordinator.http.openai import schemas
from spmd_tx.coordinator.text.replies import Reasoning, ReplyCall, ReplyContent, ReplyReader


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


def message(parts: Sequence[ReplyPart]) -> schemas.ChatMessage:
    """Return the whole message of a choice."""
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    content = "".join(part.text for part in parts if isinstance(part, ReplyContent))
    calls = [
        schemas.ChatToolCall(part.id, schemas.FunctionCall(part.call.name, part.call.arguments))
        for part in parts
        if isinstance(part, NumberedCall)
    ]
    return schemas.ChatMessage(
        "assistant",
        content or (None if calls else ""),
        reasoning_content=reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def deltas(parts: Sequence[ReplyPart]) -> list[schemas.ChatDelta]:
    """Return what the events of a stream say of some parts."""
    found = list[schemas.ChatDelta]()
    for part in parts:
        match part:
            case Reasoning():
                found.append(schemas.ChatDelta(reasoning_content=part.text))
            case ReplyContent():
                found.append(schemas.ChatDelta(content=part.text))
            case NumberedCall():
                begin = schemas.ToolCallBegin(part.index, part.id, schemas.FunctionCall(part.call.name, ""))
                arguments = schemas.ToolCallArguments(part.index, schemas.ArgumentsDelta(part.call.arguments))
                found += [schemas.ChatDelta(tool_calls=[each]) for each in (begin, arguments)]
    return found
