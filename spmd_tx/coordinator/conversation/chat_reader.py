"""Reads conversations from OpenAI's chat completions. Pure; raises InvalidRequest.

History is read leniently: a model may have written arguments that are no JSON, and they stay what they are.
"""

from collections.abc import Sequence
from typing import Any

from spmd_tx.coordinator.conversation.messages import (
    REASONING,
    Conversation,
    Fields,
    Message,
    Tool,
    ToolCall,
    in_order_of_calls,
    shown,
)
from spmd_tx.coordinator.conversation.reading import (
    ImageData,
    JoinedContent,
    function_of,
    image_of_url,
    joined,
)
from spmd_tx.errors import InvalidRequest, WrongField

# They mark what a provider's cache should keep; prefixes are always cached here.
CACHE_MARKS = frozenset({"cache_control", "prompt_cache_breakpoint"})
IMAGE = "image_url"  # the type of a part
DETAILS = (None, "auto", "high")
READ = frozenset({"role", "content", "tool_calls", "tool_call_id"})


def read_conversation(
    messages: Sequence[Fields], tools: Sequence[Fields] | None, has_parallel_calls: bool
) -> Conversation:
    """Read messages with parts of content joined, and tools."""
    read = in_order_of_calls([_message(number, fields) for number, fields in enumerate(messages)])
    offered = [_tool(place, fields) for place, fields in enumerate(tools or ())]
    return Conversation(tuple(read), tuple(offered), has_parallel_calls)


def _message(number: int, fields: Fields) -> Message:
    if not isinstance(fields.get("role"), str):
        raise InvalidRequest(f"message {number} has no role; send one that the model's chat template knows")
    call_id = fields.get("tool_call_id")
    if not isinstance(call_id, str | None):
        raise InvalidRequest(f"message {number}: tool_call_id is {shown(call_id)}; send a text")
    others = {
        key: value
        for key, value in fields.items()
        if value is not None and key not in READ and key not in CACHE_MARKS
    }
    content = _content(number, fields.get("content"))
    return Message(
        fields["role"],
        content.text,
        _take_reasoning(others),
        _calls(number, fields.get("tool_calls")),
        call_id,
        others,
        images=content.images,
    )


def _content(number: int, content: Any) -> JoinedContent:
    if isinstance(content, list):
        return joined([_part(number, place, part) for place, part in enumerate(content)], "\n")
    if not isinstance(content, str | None):
        raise InvalidRequest(
            f"message {number}: content is {shown(content)}; send text, or a list of text parts"
        )
    return JoinedContent(content or "")


def _part(number: int, place: int, part: Any) -> str | ImageData:
    if not isinstance(part, dict) or part.get("type") != IMAGE:
        return _text(number, part)
    where, image = f"messages[{number}].content[{place}].image_url", part.get("image_url")
    if isinstance(image, dict) and image.get("detail") not in DETAILS:
        raise WrongField(
            f"{where}.detail is {shown(image['detail'])}; images keep their size here, so leave it out, or "
            "send auto or high",
            f"{where}.detail",
        )
    return image_of_url(f"{where}.url", image.get("url") if isinstance(image, dict) else image)


def _text(number: int, part: Any) -> str:
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (part, None)
    if kind != "text" or not isinstance(text, str):
        raise InvalidRequest(
            f"message {number} has a part of type {shown(kind)}; send parts of the types text and image_url"
        )
    lost = [key for key, value in part.items() if value and key not in {"type", "text", *CACHE_MARKS}]
    if lost:
        raise InvalidRequest(
            f"message {number} has a part of text with {lost[0]}, which the model would not see; leave it out"
        )
    return text


def _take_reasoning(others: dict[str, Any]) -> str:
    """Remove the reasoning from a message's other fields, and return it. A second one that differs stays."""
    given = [others[key] for key in REASONING if isinstance(others.get(key), str)]
    for key in REASONING:
        if given and others.get(key) == given[0]:
            del others[key]
    return given[0] if given else ""


def _calls(number: int, calls: Any) -> tuple[ToolCall, ...]:
    if not isinstance(calls, list | None):
        raise InvalidRequest(f"message {number}: tool_calls is {shown(calls)}; send a list of calls")
    return tuple(
        _call(f"message {number}: tool_calls[{place}]", call) for place, call in enumerate(calls or ())
    )


def _call(place: str, call: Any) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        kind = call.get("type") if isinstance(call, dict) else call
        raise InvalidRequest(
            f"{place} is of type {shown(kind)}, or has no function with a name; this model takes calls of "
            "functions"
        )
    if not isinstance(call.get("id"), str | None):
        raise InvalidRequest(f"{place}.id is {shown(call['id'])}; send a text")
    arguments = function.get("arguments")
    if not isinstance(arguments, str | dict | None):
        raise InvalidRequest(
            f"{place}.function.arguments is {shown(arguments)}; send a JSON object, or its text"
        )
    return ToolCall(call.get("id"), function["name"], arguments or "")


def _tool(place: int, fields: Fields) -> Tool:
    function = fields.get("function")
    if fields.get("type", "function") != "function" or not isinstance(function, dict):
        raise WrongField(
            f"tools[{place}] is of type {shown(fields.get('type'))}, or has no function; send functions",
            f"tools[{place}]",
        )
    return function_of(f"tools[{place}].function", function, param=f"tools[{place}]")
