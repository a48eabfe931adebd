"""Reads what to train on: one JSON object per line, of one of four shapes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from spmd_tx.errors import UNREADABLE, StartError

RowMessage = dict[str, Any]  # role, content, and what else the model's chat template reads
SHAPES = {
    "messages": '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}',
    "completion": '{"prompt": "...", "completion": "..."}',
    "text": '{"text": "..."}',
    "chosen": '{"prompt": "...", "chosen": "...", "rejected": "..."}',
}
SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class ChatRow:
    """A conversation; what the assistant says in it is learned."""

    messages: Sequence[RowMessage]
    tools: Sequence[Any] | None = None  # that the assistant could call


@dataclass(frozen=True)
class CompletionRow:
    """A text that is learned as what follows another."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class TextRow:
    """A text of which every token is learned."""

    text: str


@dataclass(frozen=True)
class PreferenceRow:
    """Two answers to one conversation, of which the first is better."""

    prompt: Sequence[RowMessage]
    chosen: Sequence[RowMessage]
    rejected: Sequence[RowMessage]


DataRow = ChatRow | CompletionRow | TextRow | PreferenceRow


def read_rows(path: Path) -> list[DataRow]:
    """Return the rows of a file. Raises StartError, which names the line, for what none of the shapes has."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as problem:
        raise StartError(f"cannot read {path}: {problem.strerror}") from None
    rows = [read_row(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise StartError(f"{path} has no rows; write one JSON object per line, such as {SHAPES['messages']}")
    if len({isinstance(row, PreferenceRow) for row in rows}) > 1:
        raise StartError(f"{path} has preferences and other rows; train on one file after the other")
    return rows


def read_row(line: bytes, place: str) -> DataRow:
    """Return the row of a line. Raises StartError, with the place, for one that is no row."""
    try:
        row = msgspec.json.decode(line)
    except UNREADABLE as problem:
        raise StartError(f"{place} is not JSON: {problem}") from None
    match row:
        case {"chosen": _}:
            return _preference(row, place)
        case {"messages": _}:
            return _chat(row, place)
        case {"completion": _}:
            return CompletionRow(_string(row, "prompt", place), _string(row, "completion", place))
        case {"text": _}:
            return TextRow(_string(row, "text", place))
        case dict():
            known = "; ".join(SHAPES.values())
            raise StartError(f"{place} has the keys {', '.join(row) or 'none'}; a row is one of: {known}")
    raise StartError(f"{place} is {_shown(row)}; a row is a JSON object, such as {SHAPES['messages']}")


def _chat(row: dict[str, Any], place: str) -> ChatRow:
    messages = _messages(row["messages"], f"messages of {place}")
    if not any(message["role"] == "assistant" for message in messages):
        raise StartError(f"{place} has no message of the role assistant, so there is nothing to learn")
    tools = row.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise StartError(f"tools of {place} is {_shown(tools)}; it must be a list")
    return ChatRow(messages, tools)


def _preference(row: dict[str, Any], place: str) -> PreferenceRow:
    chosen = _said(row.get("chosen"), "assistant", f"chosen of {place}")
    rejected = _said(row.get("rejected"), "assistant", f"rejected of {place}")
    if "prompt" in row:
        return PreferenceRow(_said(row["prompt"], "user", f"prompt of {place}"), chosen, rejected)
    # Both are whole conversations, which share their beginning.
    shared = next((n for n, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), 0)
    if not shared:
        raise StartError(f"{place} has no prompt, and chosen and rejected share no first message")
    return PreferenceRow(chosen[:shared], chosen[shared:], rejected[shared:])


def _said(value: object, role: str, place: str) -> list[RowMessage]:
    return [{"role": role, "content": value}] if isinstance(value, str) else _messages(value, place)


def _messages(value: object, place: str) -> list[RowMessage]:
    if not isinstance(value, list) or not value:
        raise StartError(f"{place} is {_shown(value)}; it must be a list of messages")
    for message in cast(list[Any], value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise StartError(f"{place} has {_shown(message)}; a message has a role and a content")
    return value


def _string(row: dict[str, Any], key: str, place: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise StartError(f"{key} of {place} is {_shown(value)}; it must be a string")
    return value


def _shown(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + "..."
