"""Reads what OpenAI's requests demand of the form of an answer. Pure; raises WrongField."""

from collections.abc import Mapping, Sequence
from typing import Any

from spmd_tx.coordinator.conversation.messages import Tool, shown
from spmd_tx.coordinator.grammar.constraints import (
    ANY_CALL,
    ANY_OBJECT,
    Constraint,
    JsonAnswer,
    TextPattern,
    chosen_tool,
    strict_among,
)
from spmd_tx.coordinator.http.openai.response_schemas import ResponsesRequest
from spmd_tx.coordinator.http.openai.schemas import ChatRequest, Parameters
from spmd_tx.errors import WrongField


def constraint_of(request: ChatRequest, tools: Sequence[Tool]) -> Constraint:
    """Return what a chat demands of its answer; ``tools`` are those that the model may call."""
    pattern, must_call = pattern_of(request), _must_call(request.tool_choice, tools)
    form = _json_answer(request)
    if pattern is not None and (form is not None or must_call is not None):
        other = "response_format" if form is not None else "tool_choice"
        raise WrongField(f"{pattern.kind} and {other} both say what the answer is; send one of them", other)
    return Constraint(form or pattern, must_call, strict_among(tools, _strict(request.tools or ())))


def pattern_of(request: Parameters) -> TextPattern | None:
    """Return the regular expression or the grammar of a request."""
    if request.regex is not None and request.grammar is not None:
        raise WrongField("send a grammar or a regular expression, not both", "regex")
    if request.regex is not None:
        return TextPattern("regex", request.regex)
    return None if request.grammar is None else TextPattern("lark", request.grammar)


def _json_answer(request: ChatRequest) -> JsonAnswer | None:
    form = request.response_format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return JsonAnswer(ANY_OBJECT)
    if form.json_schema is None or form.json_schema.schema is None:
        raise WrongField(
            "response_format has no schema; send it as json_schema.schema, or set type to json_object",
            "response_format",
        )
    return JsonAnswer(form.json_schema.schema, form.json_schema.strict is True)


def _must_call(choice: str | Mapping[str, Any] | None, tools: Sequence[Tool]) -> str | None:
    """Return the name of the tool that must be called, or ANY_CALL; None: none need be."""
    if choice in (None, "none", "auto"):
        return None
    if choice == "required":
        return chosen_tool(ANY_CALL, tools)
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise WrongField(
            f"tool_choice is {shown(choice)}; send none, auto, required, or a function with its name",
            "tool_choice",
        )
    return chosen_tool(name, tools)


def _strict(tools: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the names of strict tools; in chats a tool holds a function, in Responses it is one."""
    functions = [tool.get("function", tool) for tool in tools]
    return [
        each.get("name") for each in functions if isinstance(each, Mapping) and each.get("strict") is True
    ]


def constraint_of_response(request: ResponsesRequest, tools: Sequence[Tool]) -> Constraint:
    """Return what a request for a response demands; ``tools`` are those that the model may call."""
    choice, form = request.tool_choice, (request.text or {}).get("format") or {}
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        choice = {"function": choice}
    kind, schema = form.get("type", "text"), form.get("schema")
    answer = None
    if kind == "json_object":
        answer = JsonAnswer(ANY_OBJECT)
    elif kind == "json_schema" and isinstance(schema, Mapping):
        answer = JsonAnswer(schema, form.get("strict") is True)
    elif kind != "text":
        raise WrongField(
            f"text.format is of type {shown(kind)}, or has no schema; send text, json_object, or json_schema "
            "with a schema",
            "text.format",
        )
    strict = strict_among(tools, _strict(request.tools or ()))
    return Constraint(answer, _must_call(choice, tools), strict)
