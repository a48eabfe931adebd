"""Checks the messages of a chat, and puts them into the form that chat templates read. Pure."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from spmd_tx.coordinator.text.conversation import Message
from spmd_tx.errors import InvalidRequest

# They mark what a provider's cache should keep; prefixes are always cached here.
CACHE_MARKS = frozenset({"cache_control", "prompt_cache_breakpoint"})

MOST_SHOWN, MOST_CHARACTERS = 8, 80  # ids, and characters of a value, in a message about it


def conversation(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the messages with parts of content joined, and results of tools in the order of their calls.

    Few templates write the ids that say which result belongs to which call. Raises InvalidRequest.
    """
    checked = [_message(number, message) for number, message in enumerate(messages)]
    return _in_order_of_calls(checked)


def _message(number: int, message: Message) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise InvalidRequest(f"message {number} has no role; send one that the model's chat template knows")
    fields = {key: value for key, value in message.items() if key not in CACHE_MARKS}
    content = message.get("content")
    if isinstance(content, list):
        fields["content"] = "\n".join(_text(number, part) for part in content)
    elif content is not None and not isinstance(content, str):
        raise InvalidRequest(
            f"message {number}: content is {_shown(content)}; send text, or a list of text parts"
        )
    _check_calls(number, message.get("tool_calls"))
    if not isinstance(message.get("tool_call_id"), str | None):
        raise InvalidRequest(
            f"message {number}: tool_call_id is {_shown(message['tool_call_id'])}; send a text"
        )
    return fields


def _text(number: int, part: Any) -> str:
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (part, None)
    if kind != "text" or not isinstance(text, str):
        raise InvalidRequest(
            f"message {number} has a part of type {_shown(kind)}; this model takes parts of text"
        )
    lost = [key for key, value in part.items() if value and key not in {"type", "text", *CACHE_MARKS}]
    if lost:
        raise InvalidRequest(
            f"message {number} has a part of text with {lost[0]}, which the model would not see; leave it out"
        )
    return text


def _check_calls(number: int, calls: Any) -> None:
    if not isinstance(calls, list | None):
        raise InvalidRequest(f"message {number}: tool_calls is {_shown(calls)}; send a list of calls")
    for place, call in enumerate(calls or ()):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            kind = call.get("type") if isinstance(call, dict) else call
            raise InvalidRequest(
                f"message {number}: tool_calls[{place}] is of type {_shown(kind)}, or has no function with a "
                "name; this model takes calls of functions"
            )
        if not isinstance(call.get("id"), str | None):
            raise InvalidRequest(
                f"message {number}: tool_calls[{place}].id is {_shown(call['id'])}; send a text"
            )
        arguments = function.get("arguments")
        if not isinstance(arguments, str | dict | None):
            raise InvalidRequest(
                f"message {number}: tool_calls[{place}].function.arguments is {_shown(arguments)}; send a "
                "JSON object, or its text"
            )


def _in_order_of_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    ordered: list[dict[str, Any]] = []
    for are_results, run in groupby(messages, key=lambda message: message["role"] == "tool"):
        messages_of_run = list(run)
        asking = ordered[-1] if ordered else {}
        ordered += _results(len(ordered), messages_of_run, asking) if are_results else messages_of_run
    return ordered


def _results(number: int, results: list[dict[str, Any]], asking: Message) -> list[dict[str, Any]]:
    """Return results in the order of the calls of the message before them, if they name their calls."""
    places = {call.get("id"): place for place, call in enumerate(asking.get("tool_calls") or ())}
    ids = [result.get("tool_call_id") for result in results]
    unknown = next((place for place, id in enumerate(ids) if id is not None and id not in places), None)
    if unknown is not None:
        calls = ", ".join(repr(id) for id in list(places)[:MOST_SHOWN]) or "none"
        raise InvalidRequest(
            f"message {number + unknown}: tool_call_id {_shown(ids[unknown])} is of no call in the "
            f"assistant's message before it, whose calls are {calls}; send results right behind their calls"
        )
    return results if None in ids else sorted(results, key=lambda result: places[result["tool_call_id"]])


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."
