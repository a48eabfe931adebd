"""Writes a conversation as the messages that a chat template takes, by what its probe has found. Pure.

Nothing is lost: what a template refuses in one form is written in another one that it takes.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from spmd_tx.coordinator.conversation.messages import (
    INSTRUCTING,
    REASONING,
    TOOL,
    USER,
    Message,
    Tool,
    ToolCall,
)
from spmd_tx.coordinator.text.conversation import CALLS, FUNCTION
from spmd_tx.coordinator.text.template_probe import CallIds, TemplateTraits
from spmd_tx.errors import InvalidRequest

REMINDER = "<system-reminder>\n{}\n</system-reminder>"  # which models are used to from coding agents
BETWEEN = "\n\n"  # texts of messages that become one
SHORT_ID = 9  # letters


def template_messages(
    messages: Sequence[Message], traits: TemplateTraits, *, drops_reasoning: bool
) -> list[dict[str, Any]]:
    """Return the messages that the template gets.

    ``drops_reasoning`` says that the model's own turns lose their reasoning where the template shows none.
    """
    if not traits.takes_images and any(message.images for message in messages):
        raise InvalidRequest("the model's chat template shows no images; leave them out, or use asample")
    turns = _split_calls(_place_instructions(messages, traits), traits)
    key = traits.reasoning_key or ("" if drops_reasoning else REASONING[0])
    return [_fields(turn, key) for turn in _native_ids(turns, traits.call_ids)]


def template_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the tools that the template gets."""
    return [{"type": "function", FUNCTION: _function(tool)} for tool in tools]


def _function(tool: Tool) -> dict[str, Any]:
    described = {"description": tool.description} if tool.description else {}
    return {"name": tool.name, **described, "parameters": tool.parameters}


def _place_instructions(messages: Sequence[Message], traits: TemplateTraits) -> list[Message]:
    """Join the system messages that lead, and put later ones into the user's, where they are not taken."""
    count = next((at for at, each in enumerate(messages) if each.role not in INSTRUCTING), len(messages))
    leading, later = list(messages[:count]), list(messages[count:])
    if not traits.takes_leading_systems:
        leading = _join_neighbours(leading, INSTRUCTING)
    if traits.takes_later_systems or not any(each.role in INSTRUCTING for each in later):
        return [*leading, *later]
    later = [
        replace(each, role=USER, text=REMINDER.format(each.text)) if each.role in INSTRUCTING else each
        for each in later
    ]
    return [*leading, *(later if traits.takes_successive_users else _join_neighbours(later, {USER}))]


def _join_neighbours(messages: Sequence[Message], roles: Collection[str]) -> list[Message]:
    """Make one message of each run of messages with these roles."""
    joined = list[Message]()
    for message in messages:
        if joined and message.role in roles and joined[-1].role in roles:
            before = joined.pop()
            text = BETWEEN.join(filter(None, (before.text, message.text)))
            moved = len(text) - len(message.text)
            images = *before.images, *(replace(each, at=each.at + moved) for each in message.images)
            message = replace(before, text=text, others={**message.others, **before.others}, images=images)
        joined.append(message)
    return joined


def _split_calls(messages: Sequence[Message], traits: TemplateTraits) -> list[Message]:
    """Write what stands beside calls, and several calls, as turns of their own where that is not taken."""
    turns, at = list[Message](), 0
    while at < len(messages):
        message = messages[at]
        at += 1
        if message.calls and message.text and not _takes_text_beside_calls(message, traits):
            turns.append(replace(message, reasoning="", calls=()))
            message = replace(message, text="", others={})
        if len(message.calls) < 2 or traits.takes_parallel_calls:
            turns.append(message)
            continue
        results = _results_by_call(messages, at, message.calls)
        at += sum(map(len, results.values()))
        for number, call in enumerate(message.calls):
            turn = message if number == 0 else Message(message.role)
            turns += [replace(turn, calls=(call,)), *results.pop(call.id, ())]
    return turns


def _takes_text_beside_calls(message: Message, traits: TemplateTraits) -> bool:
    shows_reasoning = message.reasoning and traits.reasoning_key
    return traits.takes_reasoning_beside_both if shows_reasoning else traits.takes_content_beside_calls


def _results_by_call(
    messages: Sequence[Message], at: int, calls: Sequence[ToolCall]
) -> dict[str | None, list[Message]]:
    """Return the results from this place on, for each of the calls before it."""
    results: dict[str | None, list[Message]] = {call.id: [] for call in calls}
    while at < len(messages) and messages[at].role == TOOL and messages[at].call_id in results:
        results[messages[at].call_id].append(messages[at])
        at += 1
    return results


def _native_ids(messages: Sequence[Message], kind: CallIds) -> list[Message]:
    """Write ids of calls as the model does."""
    if kind is CallIds.ANY:
        return list(messages)
    written, known, count = list[Message](), dict[str | None, str](), 0
    for message in messages:
        if message.calls:
            known, calls = {}, list[ToolCall]()
            for call in message.calls:
                native = f"functions.{call.name}:{count}" if kind is CallIds.NUMBERED else _short(call, count)
                count += 1
                known[call.id] = native
                calls.append(replace(call, id=native))
            message = replace(message, calls=tuple(calls))
        elif message.role == TOOL:
            message = replace(message, call_id=known.get(message.call_id, message.call_id))
        written.append(message)
    return written


def _short(call: ToolCall, number: int) -> str:
    """Return an id of nine letters and digits."""
    if call.id is not None and len(call.id) == SHORT_ID and call.id.isascii() and call.id.isalnum():
        return call.id
    return hashlib.sha256(f"{number}:{call.id}".encode()).hexdigest()[:SHORT_ID]


def _fields(message: Message, reasoning_key: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": _content(message), **message.others}
    if message.reasoning and reasoning_key:
        fields[reasoning_key] = message.reasoning
    if message.calls:
        fields[CALLS] = [_call(call) for call in message.calls]
    if message.call_id is not None:
        fields["tool_call_id"] = message.call_id
    return fields


def _content(message: Message) -> str | list[dict[str, Any]]:
    """Return the text; with images, the parts."""
    if not message.images:
        return message.text
    parts, at = list[dict[str, Any]](), 0
    for image in message.images:
        parts += [*_text_part(message.text[at : image.at]), {"type": "image"}]
        at = image.at
    return [*parts, *_text_part(message.text[at:])]


def _text_part(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}] if text else []


def _call(call: ToolCall) -> Mapping[str, Any]:
    id = {} if call.id is None else {"id": call.id}
    return {**id, "type": "function", FUNCTION: {"name": call.name, "arguments": call.arguments}}
