"""Reads conversations from the items of OpenAI's Responses. Pure; raises InvalidRequest.

An assistant's turn is a run of items. Items that say nothing to a model are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from spmd_tx.coordinator.conversation.messages import (
    ASSISTANT,
    DEVELOPER,
    SYSTEM,
    TOOL,
    USER,
    Conversation,
    Fields,
    Message,
    MessageImage,
    OpenSeal,
    ToolCall,
    in_order_of_calls,
    shown,
)
from spmd_tx.coordinator.conversation.reading import ImageData, JoinedContent, image_of_url, joined, text_of
from spmd_tx.coordinator.conversation.responses_tools import OfferedTools
from spmd_tx.errors import WrongField

ROLES = frozenset({USER, ASSISTANT, SYSTEM, DEVELOPER})
TEXTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
MESSAGE, REASONING = "message", "reasoning"
IMAGE = "input_image"  # the type of a part
CALLS = frozenset({"function_call", "custom_tool_call"})
OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output"})
REFERENCE = "item_reference"  # to an item that a server has stored


def read_items(
    instructions: str | None,
    items: str | Sequence[Any],
    tools: OfferedTools,
    has_parallel_calls: bool,
    open_seal: OpenSeal,
    earlier: Sequence[Message] = (),
) -> Conversation:
    """Read a conversation; ``earlier`` is what the input goes on from."""
    reader = _Reader(open_seal)
    if instructions:
        reader.messages.append(Message(SYSTEM, instructions))
    reader.go_on_from(earlier)
    if isinstance(items, str):
        reader.messages.append(Message(USER, items))
        items = []
    for number, item in enumerate(items):
        reader.item(f"input[{number}]", item)
    reader.end_turn()
    return Conversation(
        tuple(in_order_of_calls(reader.messages)),
        tools.tools,
        has_parallel_calls,
        has_own_instructions=bool(instructions),
    )


@dataclass
class _Turn:
    """Collects the items of one turn of the assistant."""

    texts: list[str] = field(default_factory=list)
    length: int = 0  # characters of all texts
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    images: list[MessageImage] = field(default_factory=list)
    id: str | None = None  # as in Message

    def say(self, content: JoinedContent) -> None:
        self.images += [replace(image, at=self.length + image.at) for image in content.images]
        self.texts.append(content.text)
        self.length += len(content.text)

    def message(self) -> Message:
        return Message(
            ASSISTANT,
            "".join(self.texts),
            "".join(self.reasoning),
            tuple(self.calls),
            turn_id=self.id,
            images=tuple(self.images),
        )


@dataclass
class _Reader:
    open_seal: OpenSeal
    messages: list[Message] = field(default_factory=list)
    _turn: _Turn | None = None  # of the assistant, as far as it is read
    _calls: frozenset[str] = frozenset()  # ids of the latest turn

    def go_on_from(self, messages: Sequence[Message]) -> None:
        self.messages += messages
        self._calls = messages[-1].call_ids if messages else frozenset()

    def item(self, place: str, item: Any) -> None:
        if not isinstance(item, dict):
            raise WrongField(f"{place} is {shown(item)}; send an item", place)
        kind = MESSAGE if item.get("type") is None else text_of(place, item, "type")
        if kind == MESSAGE:
            self._message(place, item)
        elif kind == REASONING:
            self._reasoning(place, item)
        elif kind in CALLS:
            self._call(place, item, kind)
        elif kind in OUTPUTS:
            self._output(place, item)
        elif kind == REFERENCE:
            raise WrongField(
                f"{place} refers to an item, and this server stores none; send the item itself",
                place,
            )

    def end_turn(self) -> None:
        if self._turn is not None:
            self.messages.append(self._turn.message())
            self._calls = self.messages[-1].call_ids
            self._turn = None

    def _in_turn(self) -> _Turn:
        """Return the assistant's turn that the next item belongs to."""
        if self._turn is None:
            self._turn = _Turn()
        return self._turn

    def _message(self, place: str, item: Fields) -> None:
        role = item.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise WrongField(f"{place}.role is {shown(role)}; send one of {', '.join(sorted(ROLES))}", place)
        between = "" if role == ASSISTANT else "\n"
        content = _content(f"{place}.content", item.get("content"), between)
        if role == ASSISTANT:
            self._in_turn().say(content)
        elif content.text or content.images or role == USER:
            self.end_turn()
            self.messages.append(Message(role, content.text, images=content.images))

    def _reasoning(self, place: str, item: Fields) -> None:
        sealed = item.get("encrypted_content")
        turn_id = self.open_seal(sealed) if isinstance(sealed, str) else None
        turn = self._turn
        if turn is not None and (turn.length or turn.calls) and (turn_id is None or turn_id != turn.id):
            self.end_turn()  # reasoning begins a turn
        turn = self._in_turn()
        key = "content" if item.get("content") else "summary"
        turn.reasoning.append(_content(f"{place}.{key}", item.get(key), between="\n\n").text)
        turn.id = turn.id or turn_id

    def _call(self, place: str, item: Fields, kind: str) -> None:
        id, name = text_of(place, item, "call_id"), text_of(place, item, "name")
        if kind == "function_call":
            arguments = text_of(place, item, "arguments")
        else:
            arguments = msgspec.json.encode({"input": text_of(place, item, "input")}).decode()
        space = item.get("namespace")
        name = OfferedTools.joined(space, name) if isinstance(space, str) else name
        self._in_turn().calls.append(ToolCall(id, name, arguments))

    def _output(self, place: str, item: Fields) -> None:
        self.end_turn()
        id = text_of(place, item, "call_id")
        if id not in self._calls:
            raise WrongField(
                f"{place}.call_id {shown(id)} is of no call in the turn before it; send outputs right behind "
                "their calls",
                f"{place}.call_id",
            )
        text, images = _content(f"{place}.output", item.get("output"), "\n")
        self.messages.append(Message(TOOL, text, call_id=id, images=images))


def _content(place: str, content: Any, between: str) -> JoinedContent:
    """Return the text of a content, whose parts are texts and images."""
    if isinstance(content, str | None):
        return JoinedContent(content or "")
    if not isinstance(content, list):
        raise WrongField(f"{place} is {shown(content)}; send a text, or a list of parts", place)
    parts = list[str | ImageData]()
    for number, part in enumerate(content):
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (part, None)
        if kind == IMAGE:
            parts.append(image_of_url(f"{place}[{number}].image_url", part.get("image_url")))
            continue
        if kind == "refusal" and isinstance(part, dict):
            text = part.get("refusal")
        elif not isinstance(kind, str) or kind not in TEXTS:
            text = None
        if not isinstance(text, str):
            raise WrongField(
                f"{place}[{number}] is a part of type {shown(kind)}; send parts of the types input_text and "
                "input_image",
                f"{place}[{number}]",
            )
        parts.append(text)
    return joined(parts, between)
