"""Writes what a model has replied as the message of a chat completion, whole or as deltas. Pure."""

from collections.abc import Sequence

from msgspec import UNSET

from spmd_tx.coordinator.http.openai import schemas
from spmd_tx.coordinator.http.text_generation.replies import NumberedCall, ReplyPart
from spmd_tx.coordinator.text.reply_events import Reasoning, ReplyContent


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
