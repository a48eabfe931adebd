"""Turns a chat completion into a prompt."""

from collections.abc import Mapping
from typing import Any

from spmd_tx.coordinator.bases.served_base import ServedBase
from spmd_tx.coordinator.conversation.chat_reader import read_conversation
from spmd_tx.coordinator.http.openai.demands import constraint_of
from spmd_tx.coordinator.http.openai.requests import stop_strings
from spmd_tx.coordinator.http.openai.schemas import ChatRequest
from spmd_tx.coordinator.http.text_generation.kept_turns import KeptTurns
from spmd_tx.coordinator.http.text_generation.prompts import ChatPrompt, constrained, make_prompt, traits_of
from spmd_tx.coordinator.runtime.threads import compute
from spmd_tx.coordinator.text.template_probe import TemplateTraits
from spmd_tx.errors import WrongField

EFFORT = "reasoning_effort"
NO_EFFORT = "none"


async def read(request: ChatRequest, size: int, base: ServedBase, kept: KeptTurns) -> ChatPrompt:
    """Read a chat whose body has ``size`` bytes, and make its prompt. Raises InvalidRequest."""
    tools = [] if request.tool_choice == "none" else request.tools or []
    effort = _effort(request.reasoning_effort, await traits_of(base))
    variables = {**effort, **(request.chat_template_kwargs or {})}
    are_parallel = request.parallel_tool_calls is not False
    conversation = await compute(size, read_conversation, request.messages, tools, are_parallel)
    constraint = await compute(size, constraint_of, request, conversation.tools)
    prompt = await make_prompt(conversation, variables, stop_strings(request), base, size, kept)
    return await constrained(prompt, constraint, base)


def _effort(effort: str | None, traits: TemplateTraits) -> Mapping[str, Any]:
    """Return the variables of the chat template for an effort. Raises WrongField."""
    if effort is None:
        return {}
    if EFFORT in traits.variables:
        return {EFFORT: effort}
    if effort == NO_EFFORT and traits.thinking_switch:
        return {traits.thinking_switch: False}
    switch = f", or send {NO_EFFORT}, which this model has" if traits.thinking_switch else ""
    raise WrongField(
        f"{EFFORT} is not offered for this model: its chat template has no such variable; leave it out"
        f"{switch}",
        EFFORT,
    )
