"""Reads conversations from Anthropic's Messages. Pure; raises InvalidRequest.

Each role has its blocks. What a block says is read, or it is refused by its place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import msgspec

from spmd_tx.coordinator.conversation.messages import (
    ASSISTANT,
    SYSTEM,
    TOOL,
    USER,
    Conversation,
    Fields,
    Message,
    OpenSeal,
    Tool,
    ToolCall,
    in_order_of_calls,
    shown,
)
from spmd_tx.coordinator.conversation.messages_tools import OfferedTool
from spmd_tx.coordinator.conversation.reading import ImageData, joined, refuse, text_of
from spmd_tx.errors import WrongField

CALL_ID, TOOL_USE_ID = "call_", "toolu_"  # what ids of calls begin with, here and in this dialect
BILLING = "x-anthropic-billing-header"  # a line that differs between conversations, and is no instruction
ERROR = "<tool_use_error>{}</tool_use_error>"  # what a tool says that has failed

# Fields without effect: marks of caches, and nulls that SDKs write.
MARKS = frozenset({"cache_control", "citations", "caller", "toolset_name"})
BLOCKS: Mapping[str, frozenset[str]] = {
    "text": frozenset({"text"}),
    "image": frozenset({"source"}),
    "thinking": frozenset({"thinking", "signature"}),
    "redacted_thinking": frozenset({"data"}),
    "tool_use": frozenset({"id", "name", "input"}),
    "tool_result": frozenset({"tool_use_id", "content", "is_error"}),
    "tool_reference": frozenset({"tool_name"}),
}
TEXT, IMAGE, THINKING, REDACTED, CALL, RESULT, REFERENCE = BLOCKS
ALLOWED: Mapping[str, frozenset[str]] = {
    USER: frozenset({TEXT, IMAGE, RESULT}),
    ASSISTANT: frozenset({TEXT, THINKING, REDACTED, CALL}),
    SYSTEM: frozenset({TEXT}),
    TOOL: frozenset({TEXT, IMAGE, REFERENCE}),  # within a result
}


def canonical_id(id: str) -> str:
    """Return a call's id as it is outside this dialect."""
    return CALL_ID + id.removeprefix(TOOL_USE_ID) if id.startswith(TOOL_USE_ID) else id


def read_messages(
    system: Any,
    messages: Sequence[Fields],
    tools: Sequence[OfferedTool],
    has_parallel_calls: bool,
    open_seal: OpenSeal,
) -> Conversation:
    """Read a conversation. Tools that wait are described where a result names them."""
    reader = _Reader({each.tool.name: each for each in tools}, open_seal)
    read = reader.system(system)
    for number, fields in enumerate(messages):
        read += reader.message(f"messages[{number}]", fields)
    if read and read[-1].role == ASSISTANT:
        raise WrongField(
            f"messages[{len(messages) - 1}] is the assistant's, and an answer is a message of its own; end "
            "with a message of the user",
            "messages",
        )
    shown_tools = [each.tool for each in tools if not each.waits and each.tool.name not in reader.referenced]
    later = [each.tool for each in tools if each.tool.name in reader.referenced]
    ordered = in_order_of_calls(_results_first(read))
    return Conversation(tuple(ordered), tuple(shown_tools), has_parallel_calls, tuple(later))


@dataclass
class _Block:
    """Holds a part of a message, and where it is."""

    place: str
    kind: str
    fields: Fields

    def text(self, key: str) -> str:
        """Return the text of a field."""
        return text_of(self.place, self.fields, key)

    def image(self) -> ImageData:
        """Return the file of an image."""
        place, source = f"{self.place}.source", self.fields.get("source")
        if not isinstance(source, dict) or source.get("type") != "base64":
            raise WrongField(
                f"{place} is {shown(source)}; images are never fetched, so send the type base64, and data",
                place,
            )
        return ImageData(text_of(place, source, "data"))


class _Reader:
    def __init__(self, offered: Mapping[str, OfferedTool], open_seal: OpenSeal) -> None:
        self.referenced = set[str]()  # names of tools that results have brought in
        self._offered, self._open_seal = offered, open_seal
        self._calls = frozenset[str]()  # ids of the latest message of the assistant

    def system(self, system: Any) -> list[Message]:
        if system is None:
            return []
        return self._instructions(_blocks("system", system, SYSTEM))

    def message(self, place: str, fields: Fields) -> list[Message]:
        role = fields.get("role")
        refuse(place, sorted(fields.keys() - {"role", "content"} - MARKS))
        if role not in (USER, ASSISTANT, SYSTEM):
            raise WrongField(
                f"{place}.role is {shown(role)}; send user, assistant or system", f"{place}.role"
            )
        blocks = _blocks(f"{place}.content", fields.get("content"), role)
        match role:
            case "system":
                return self._instructions(blocks)
            case "user":
                return self._user(blocks)
            case _:
                return [self._assistant(blocks)]

    def _instructions(self, blocks: Sequence[_Block]) -> list[Message]:
        lines = [line for block in blocks for line in block.text(TEXT).split("\n")]
        if any(line.startswith(BILLING) for line in lines):
            lines = [line for line in lines if not line.startswith(BILLING)]
        text = "\n".join(lines)
        return [Message(SYSTEM, text)] if text.strip() else []

    def _user(self, blocks: Sequence[_Block]) -> list[Message]:
        results = [self._result(block) for block in blocks if block.kind == RESULT]
        said = [block for block in blocks if block.kind != RESULT]
        text, images = joined(
            [block.image() if block.kind == IMAGE else block.text(TEXT) for block in said], "\n"
        )
        return results if results and not (text or images) else [*results, Message(USER, text, images=images)]

    def _assistant(self, blocks: Sequence[_Block]) -> Message:
        thinking = [block for block in blocks if block.kind == THINKING]
        signatures = [block.text("signature") for block in thinking if block.fields.get("signature")]
        turns = filter(None, map(self._open_seal, signatures))
        calls = tuple(self._call(block) for block in blocks if block.kind == CALL)
        message = Message(
            ASSISTANT,
            "".join(block.text(TEXT) for block in blocks if block.kind == TEXT),
            "".join(block.text(THINKING) for block in thinking),
            calls,
            turn_id=next(turns, None),
        )
        self._calls = message.call_ids
        return message

    def _call(self, block: _Block) -> ToolCall:
        arguments = block.fields.get("input")
        if not isinstance(arguments, str | dict | None):
            raise WrongField(
                f"{block.place}.input is {shown(arguments)}; send an object", f"{block.place}.input"
            )
        return ToolCall(canonical_id(block.text("id")), block.text("name"), arguments or "")

    def _result(self, block: _Block) -> Message:
        call_id = block.text("tool_use_id")
        if canonical_id(call_id) not in self._calls:
            raise WrongField(
                f"{block.place}.tool_use_id {shown(call_id)} is of no tool_use in the assistant's message "
                "before it; send results right behind their calls",
                f"{block.place}.tool_use_id",
            )
        parts = _blocks(f"{block.place}.content", block.fields.get("content"), TOOL)
        text, images = joined([self._part(part) for part in parts], "\n")
        begin, end = ERROR.split("{}")
        if block.fields.get("is_error") and not (text.startswith(begin) and text.endswith(end)):
            text = ERROR.format(text)
            images = tuple(replace(each, at=each.at + len(begin)) for each in images)
        return Message(TOOL, text, call_id=canonical_id(call_id), images=images)

    def _part(self, block: _Block) -> str | ImageData:
        match block.kind:
            case "text":
                return block.text(TEXT)
            case "image":
                return block.image()
            case _:
                return self._reference(block)

    def _reference(self, block: _Block) -> str:
        name = block.text("tool_name")
        offered = self._offered.get(name)
        if offered is None:
            return f"The tool {name} is available."
        self.referenced.add(name)
        return f"The tool {name} is available from now on:\n{described(offered.tool)}"


def described(tool: Tool) -> str:
    """Return a tool as a text for the model."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return msgspec.json.encode({"type": "function", "function": function}).decode()


def _blocks(place: str, content: Any, role: str) -> list[_Block]:
    """Return the parts of a content: a text is one part, and nothing is none."""
    if content is None or content == "":
        return []
    if isinstance(content, str):
        return [_Block(place, TEXT, {TEXT: content})]
    if not isinstance(content, list):
        raise WrongField(f"{place} is {shown(content)}; send a text, or a list of blocks", place)
    return [_block(f"{place}[{number}]", each, role) for number, each in enumerate(content)]


def _block(place: str, fields: Any, role: str) -> _Block:
    kind = fields.get("type") if isinstance(fields, dict) else None
    if not isinstance(kind, str) or kind not in ALLOWED[role]:
        taken = ", ".join(sorted(ALLOWED[role]))
        raise WrongField(
            f"{place} is a block of type {shown(kind)}; this model takes {taken} there", f"{place}.type"
        )
    known = BLOCKS[kind] | MARKS | {"type"}
    refuse(place, (name for name, value in fields.items() if value and name not in known))
    return _Block(place, kind, fields)


def _results_first(messages: Sequence[Message]) -> list[Message]:
    """Put results right behind their calls: clients may say something between them."""
    ordered = list[Message]()
    for _, run in groupby(messages, key=lambda message: message.role == ASSISTANT):
        ordered += sorted(run, key=lambda message: message.role != TOOL)
    return ordered
