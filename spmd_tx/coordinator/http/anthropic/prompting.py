"""Turns a request for a message into a prompt."""

from collections.abc import Mapping, Sequence
from typing import Any

from spmd_tx.coordinator.bases.served_base import ServedBase
from spmd_tx.coordinator.conversation.messages import Conversation, OpenSeal, Tool, shown
from spmd_tx.coordinator.conversation.messages_reader import read_messages
from spmd_tx.coordinator.conversation.messages_tools import read_tools
from spmd_tx.coordinator.grammar.constraints import (
    ANY_CALL,
    Constraint,
    JsonAnswer,
    chosen_tool,
    strict_among,
)
from spmd_tx.coordinator.http.anthropic.schemas import Prompting
from spmd_tx.coordinator.http.text_generation.kept_turns import KeptTurns
from spmd_tx.coordinator.http.text_generation.prompts import ChatPrompt, constrained, make_prompt, traits_of
from spmd_tx.coordinator.runtime.threads import compute
from spmd_tx.coordinator.text.template_probe import TemplateTraits
from spmd_tx.errors import WrongField

EFFORT = "reasoning_effort"
SWITCHED = {"enabled": True, "disabled": False}  # adaptive: as the template has it


async def make(
    request: Prompting,
    stops: list[str],
    size: int,
    base: ServedBase,
    open_seal: OpenSeal,
    kept: KeptTurns | None = None,
) -> ChatPrompt:
    """Read a request whose body has ``size`` bytes, and make its prompt. Raises InvalidRequest."""
    variables = _variables(request, await traits_of(base))
    conversation = await compute(size, _read, request, open_seal)
    constraint = await compute(size, _constraint, request, conversation.tools)
    prompt = await make_prompt(conversation, variables, stops, base, size, kept)
    return await constrained(prompt, constraint, base)


def _constraint(request: Prompting, tools: Sequence[Tool]) -> Constraint:
    """Return what a request demands; ``tools`` are those that the model may call."""
    choice, must_call = request.tool_choice or {}, None
    if choice.get("type") == "any":
        must_call = chosen_tool(ANY_CALL, tools)
    elif choice.get("type") == "tool":
        if not isinstance(choice.get("name"), str):
            raise WrongField("tool_choice.name is missing; send that of a tool", "tool_choice.name")
        must_call = chosen_tool(choice["name"], tools)
    strict = [tool.get("name") for tool in request.tools or () if tool.get("strict") is True]
    return Constraint(_form(request), must_call, strict_among(tools, strict))


def _form(request: Prompting) -> JsonAnswer | None:
    form = (request.output_config or {}).get("format")
    if form is None:
        return None
    kind, schema = (form.get("type"), form.get("schema")) if isinstance(form, Mapping) else (form, None)
    if kind not in (None, "json_schema") or not isinstance(schema, Mapping):
        raise WrongField(
            f"output_config.format is {shown(form)}; send the type json_schema, and a schema",
            "output_config.format",
        )
    return JsonAnswer(schema, is_strict=True)


def _read(request: Prompting, open_seal: OpenSeal) -> Conversation:
    choice = request.tool_choice or {}
    tools = [] if choice.get("type") == "none" else read_tools(request.tools or [])
    are_parallel = not choice.get("disable_parallel_tool_use")
    return read_messages(request.system, request.messages, tools, are_parallel, open_seal)


def _variables(request: Prompting, traits: TemplateTraits) -> dict[str, Any]:
    """Return the variables of the chat template. What it has no variable for, clients send to all models."""
    variables = dict[str, Any]()
    kind = (request.thinking or {}).get("type")
    if kind in SWITCHED and traits.thinking_switch:
        variables[traits.thinking_switch] = SWITCHED[kind]
    effort = (request.output_config or {}).get("effort")
    if effort is not None and EFFORT in traits.variables:
        variables[EFFORT] = effort
    return variables
