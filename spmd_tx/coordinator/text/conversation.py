"""Writes a conversation in the ways that chat templates read, and marks it to see what they drop. Pure."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from spmd_tx.coordinator.conversation.messages import REASONING

TemplateMessage = Mapping[str, Any]

DEVELOPER, SYSTEM = "developer", "system"  # OpenAI's newer and older name of a role
# Templates turn them into an order, or into markup. The name of a result's function stands in its call, too.
CONNECTING = frozenset({"role", "id", "tool_call_id"})
CONNECTING_RESULTS = CONNECTING | {"name"}
CONNECTING_CALLS = frozenset({"id", "type", "index"})
CALLS, FUNCTION, ARGUMENTS = "tool_calls", "function", "arguments"
NO_ARGUMENTS = "{}"
PART_TYPE = "type"  # what a part of a content is, which templates read and do not write
TOLD_OF_TOOLS = ("name", "description")

_MARK, _DIGITS = "480172639", 6  # digits, which no filter of a template changes
_MARKS = re.compile(rf"(\{{')?{_MARK}(\d{{{_DIGITS}}})")


@dataclass(frozen=True)
class ValuePlace:
    """Says where a value stands in a conversation, or in its tools."""

    message: int | None  # None: in the tools
    role: str
    path: str  # within the message
    has_calls: bool  # whether the message has tool calls

    @property
    def call(self) -> str | None:
        """The tool call that it belongs to, if any."""
        return f"{self.message}.{self.path.partition('.')[0]}" if self.path.startswith(CALLS) else None

    @property
    def kind(self) -> tuple[str, str, bool]:
        """What templates treat alike: the same part of such messages."""
        return self.role, re.sub(r"\d+", "", self.path), self.has_calls


def spellings(messages: Sequence[TemplateMessage], source: str) -> Iterator[list[dict[str, Any]]]:
    """Yield ways to write the conversation that mean the same, the most usual first.

    Most templates read the arguments of tool calls as a mapping, those that concatenate strings as JSON.
    ``source`` is the text of the template; many do not know the role of developers.
    """
    has_calls = any(message.get(CALLS) for message in messages)
    has_developers = DEVELOPER in source and any(message["role"] == DEVELOPER for message in messages)
    for arguments in (_mapping, _text) if has_calls else (_mapping,):
        for instructing in (DEVELOPER, SYSTEM) if has_developers else (SYSTEM,):
            yield [_spelled(message, instructing, arguments) for message in messages]


def _spelled(message: TemplateMessage, instructing: str, arguments: Callable[[Any], Any]) -> dict[str, Any]:
    """Write a message. Null has the same meaning as a missing key, and so has an empty list of calls."""
    fields = {key: value for key, value in message.items() if value is not None}
    if fields["role"] == DEVELOPER:
        fields["role"] = instructing
    calls = fields.pop(CALLS, None)
    if calls:
        fields[CALLS] = [_call(call, arguments) for call in calls]
    fields["content"] = fields.get("content") or ""
    first, *others = [key for key in REASONING if key in fields] or [""]
    for other in others:
        if fields[other] == fields[first]:
            del fields[other]
    return fields


def _call(call: Mapping[str, Any], arguments: Callable[[Any], Any]) -> dict[str, Any]:
    function = call[FUNCTION]
    return {**call, FUNCTION: {**function, ARGUMENTS: arguments(function.get(ARGUMENTS))}}


def _mapping(arguments: Any) -> Any:
    """Return arguments as a mapping. What is no JSON object stays text: a model may have written it.

    Nor are halves of characters and numbers without bounds, which Python's own reader takes.
    """
    if isinstance(arguments, dict):
        return arguments
    try:
        mapping = msgspec.json.decode(_text(arguments))
    except (msgspec.DecodeError, RecursionError):
        return arguments
    return mapping if isinstance(mapping, dict) else arguments


def broken_arguments(messages: Sequence[TemplateMessage]) -> ValuePlace | None:
    """Return the place of arguments that are no JSON object, if there are any."""
    for number, message in enumerate(messages):
        for place, call in enumerate(message.get(CALLS) or ()):
            if isinstance(_mapping(call[FUNCTION].get(ARGUMENTS)), str):
                return ValuePlace(number, message["role"], f"{CALLS}[{place}].{FUNCTION}.{ARGUMENTS}", True)
    return None


def _text(value: Any) -> str:
    """Return arguments as JSON, as they were sent if they are."""
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False)
    return value if value and value.strip() else NO_ARGUMENTS


def numbers(messages: Sequence[TemplateMessage]) -> list[ValuePlace]:
    """Return the places of numbers and truth values beside texts. They cannot be marked."""
    return [
        ValuePlace(number, message["role"], key, CALLS in message)
        for number, message in enumerate(messages)
        for key, value in message.items()
        if value and isinstance(value, int | float)
    ]


def without_numbers(messages: Sequence[TemplateMessage]) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in message.items() if not isinstance(value, int | float)}
        for message in messages
    ]


class Marks:
    """Gives marks to the texts of a conversation, and says which of them a template has written."""

    def __init__(self) -> None:
        self.places: list[ValuePlace] = []

    def marked(self, messages: Sequence[TemplateMessage]) -> list[dict[str, Any]]:
        """Return the conversation with a mark in place of each text that a model should see."""
        return [self._message(number, message) for number, message in enumerate(messages)]

    def tools(self, tools: Any) -> Any:
        """Return tools with marks for the names and descriptions of functions."""
        return (
            [self._tool(number, tool) for number, tool in enumerate(tools)]
            if isinstance(tools, list)
            else tools
        )

    def missing(self, text: str) -> list[int]:
        """Return the numbers of the marks that are not in a text, or in the way that Python writes a mapping.

        A template may write a part of a call, as its arguments alone.
        """
        marks = [(bool(python), int(number)) for python, number in _MARKS.findall(text)]
        garbled = {number for is_python, number in marks if is_python}
        present = {number for _, number in marks if number < len(self.places)} - garbled
        shown = {self.places[number].call for number in present}
        return [
            number
            for number, place in enumerate(self.places)
            if number in garbled or not (number in present or (place.call and place.call in shown))
        ]

    def _tool(self, number: int, tool: Any) -> Any:
        function = tool.get(FUNCTION) if isinstance(tool, dict) else None
        if not isinstance(function, dict):
            return tool
        places = {
            key: ValuePlace(None, "", f"tools[{number}].{FUNCTION}.{key}", False) for key in TOLD_OF_TOOLS
        }
        fields = {
            key: self._mark(places[key]) if key in places and isinstance(value, str) and value else value
            for key, value in function.items()
        }
        return {**tool, FUNCTION: fields}

    def _message(self, number: int, message: TemplateMessage) -> dict[str, Any]:
        def of(path: str) -> ValuePlace:
            return ValuePlace(number, message["role"], path, CALLS in message)

        return {
            key: value
            if key in (CONNECTING_RESULTS if message["role"] == "tool" else CONNECTING)
            else [self._call(call, f"{key}[{place}]", of) for place, call in enumerate(value)]
            if key == CALLS
            else self._value(value, key, of)
            for key, value in message.items()
        }

    def _call(self, call: Mapping[str, Any], path: str, of: Callable[[str], ValuePlace]) -> dict[str, Any]:
        function = {key: value for key, value in call[FUNCTION].items() if key != ARGUMENTS}
        marked = {
            key: value if key in CONNECTING_CALLS else self._value(value, f"{path}.{key}", of)
            for key, value in {**call, FUNCTION: function}.items()
        }
        arguments = call[FUNCTION][ARGUMENTS]
        if arguments:
            mark = self._mark(of(f"{path}.{FUNCTION}.{ARGUMENTS}"))
            arguments = {mark: mark} if isinstance(arguments, dict) else mark
        marked[FUNCTION][ARGUMENTS] = arguments
        return marked

    def _value(self, value: Any, path: str, of: Callable[[str], ValuePlace]) -> Any:
        match value:
            case str():
                return self._mark(of(path)) if value.strip() else value
            case dict():
                kind = PART_TYPE if path.startswith("content[") else ""
                return {
                    key: each if key == kind else self._value(each, f"{path}.{key}", of)
                    for key, each in value.items()
                }
            case list():
                return [self._value(each, f"{path}[{place}]", of) for place, each in enumerate(value)]
            case _:
                return value

    def _mark(self, place: ValuePlace) -> str:
        self.places.append(place)
        return f"{_MARK}{len(self.places) - 1:0{_DIGITS}}"
