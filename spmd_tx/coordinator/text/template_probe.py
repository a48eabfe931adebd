"""Finds out what a chat template takes, by rendering short conversations. No file of a model says it."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from spmd_tx.coordinator.conversation.messages import REASONING
from spmd_tx.coordinator.text.chat_template import ChatTemplate
from spmd_tx.coordinator.text.conversation import CALLS, TemplateMessage
from spmd_tx.coordinator.text.image_pads import PAD

THINKING_SWITCHES = ("enable_thinking", "thinking")

# Words that no template writes by itself, nor changes.
_USER, _LATER, _REPLY, _THOUGHT = "probeuser", "probelater", "probereply", "probethought"
_SYSTEM, _OTHER, _RESULT = "probesystem", "probeother", "proberesult"
_TOOL, _DESCRIPTION, _VALUE = "probetool", "probedescribed", "probevalue"
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": _TOOL,
            "description": _DESCRIPTION,
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}},
                "required": ["path"],
            },
        },
    }
]


class CallIds(StrEnum):
    """Which ids of calls a template takes."""

    ANY = "any"
    NINE_LETTERS = "nine_letters"  # letters and digits
    NUMBERED = "numbered"  # functions.NAME:NUMBER, which the model reads in place of the name


_IDS = {CallIds.ANY: "call_probe{}", CallIds.NINE_LETTERS: "probeid0{}"}


@dataclass(frozen=True)
class TemplateTraits:
    """Says what a chat template takes."""

    shows_tools: bool
    takes_later_systems: bool  # and leaves them in their places
    takes_leading_systems: bool  # several of them, as they are
    takes_successive_users: bool
    takes_calls: bool
    takes_parallel_calls: bool  # several in one turn
    takes_content_beside_calls: bool
    takes_reasoning_beside_both: bool  # reasoning, content and calls in one turn
    wants_text_arguments: bool  # JSON in place of an object
    call_ids: CallIds
    reasoning_key: str | None  # of messages; None: it shows none
    variables: frozenset[str]  # which a request may set
    takes_images: bool = False  # as parts of a content

    @property
    def thinking_switch(self) -> str | None:
        """The variable that switches reasoning on and off; None if there is none."""
        return next((switch for switch in THINKING_SWITCHES if switch in self.variables), None)


@dataclass(frozen=True)
class _CallSpelling:
    """A way to write calls that the template takes."""

    ids: CallIds
    has_text_arguments: bool

    def turn(self, count: int, **fields: Any) -> TemplateMessage:
        """Return a message with calls."""
        arguments = {"path": _VALUE}
        function = {
            "name": _TOOL,
            "arguments": msgspec.json.encode(arguments).decode() if self.has_text_arguments else arguments,
        }
        calls = [
            {"id": _IDS[self.ids].format(place), "type": "function", "function": function}
            for place in range(count)
        ]
        return {"role": "assistant", "content": "", **fields, CALLS: calls}

    def conversation(self, turn: TemplateMessage) -> list[TemplateMessage]:
        """Return a conversation with the calls, and their results."""
        results = [
            {**_message("tool", _RESULT), "tool_call_id": call["id"], "name": _TOOL} for call in turn[CALLS]
        ]
        return [_message("user", _USER), turn, *results]


def probe(template: ChatTemplate) -> TemplateTraits:
    """Render some twenty conversations. Blocks for some 100 ms."""
    user, later, system = _message("user", _USER), _message("user", _LATER), _message("system", _SYSTEM)
    other, reply = _message("system", _OTHER), _message("assistant", _REPLY)
    calls, key = _find_calls(template), _reasoning_key(template)
    everything = {"content": _REPLY, **({key: _THOUGHT} if key else {})}
    return TemplateTraits(
        shows_tools=_has(template.attempt([user], tools=_TOOLS), _TOOL, _DESCRIPTION),
        takes_later_systems=_keeps(template, [user, reply, other, later]),
        takes_leading_systems=_keeps(template, [system, other, user]),
        takes_successive_users=_keeps(template, [user, later]),
        takes_calls=calls is not None,
        takes_parallel_calls=calls is not None and _takes(template, calls, 2),
        takes_content_beside_calls=calls is not None and _takes(template, calls, 1, content=_REPLY),
        takes_reasoning_beside_both=calls is not None
        and key is not None
        and _takes(template, calls, 1, **everything),
        wants_text_arguments=calls is not None and calls.has_text_arguments,
        call_ids=CallIds.ANY if calls is None else _native_ids(template, calls),
        reasoning_key=key,
        variables=template.variables,
        takes_images=_takes_images(template),
    )


def _message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": text}


def _has(text: str | None, *words: str) -> bool:
    return text is not None and all(word in text for word in words)


def _keeps(template: ChatTemplate, messages: Sequence[TemplateMessage]) -> bool:
    """Return whether the template writes all messages, in their order."""
    text = template.attempt(messages)
    if text is None:
        return False
    places = [text.find(message["content"]) for message in messages]
    return -1 not in places and places == sorted(places)


def _takes_images(template: ChatTemplate) -> bool:
    """Return whether the template writes a pad for an image between two texts."""
    parts = [{"type": "text", "text": _USER}, {"type": "image"}, {"type": "text", "text": _LATER}]
    text = template.attempt([{"role": "user", "content": parts}]) or ""
    places = [text.find(word) for word in (_USER, PAD, _LATER)]
    return -1 not in places and places == sorted(places) and text.count(PAD) == 1


def _find_calls(template: ChatTemplate) -> _CallSpelling | None:
    """Return the most usual spelling that the template takes."""
    spellings = (_CallSpelling(ids, as_text) for as_text in (False, True) for ids in _IDS)
    return next((spelling for spelling in spellings if _takes(template, spelling, 1)), None)


def _takes(template: ChatTemplate, calls: _CallSpelling, count: int, **fields: str) -> bool:
    """Return whether a turn of calls is written, with all that it says."""
    tools = {"tools": _TOOLS} if "tools" in template.variables else {}
    text = template.attempt(calls.conversation(calls.turn(count, **fields)), **tools)
    if text is None or f"'{_VALUE}'" in text:  # the object as Python shows it
        return False
    return text.count(_VALUE) >= count and _has(text, _RESULT, *fields.values())


def _native_ids(template: ChatTemplate, calls: _CallSpelling) -> CallIds:
    """Return which ids the template takes; those that it writes in place of the name are the model's own."""
    text = template.attempt([_message("user", _USER), calls.turn(1)])
    is_name = _has(text, _IDS[calls.ids].format(0)) and not _has(text, _TOOL)
    return CallIds.NUMBERED if is_name else calls.ids


def _reasoning_key(template: ChatTemplate) -> str | None:
    """Return the key under which the latest turn's reasoning is shown."""
    user = _message("user", _USER)
    for key in REASONING:
        if _has(template.attempt([user, {**_message("assistant", _REPLY), key: _THOUGHT}]), _THOUGHT):
            return key
    return None
