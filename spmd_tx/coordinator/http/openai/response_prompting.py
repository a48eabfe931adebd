"""Turns a request for a response into a prompt."""

from collections.abc import Sequence
from typing import Any

from spmd_tx.coordinator.bases.served_base import ServedBase
from spmd_tx.coordinator.conversation.messages import Conversation, Message, OpenSeal, shown
from spmd_tx.coordinator.conversation.responses_reader import read_items
from spmd_tx.coordinator.conversation.responses_tools import OfferedTools, read_tools
from spmd_tx.coordinator.http.openai.chat import EFFORT
from spmd_tx.coordinator.http.openai.demands import constraint_of_response
from spmd_tx.coordinator.http.openai.response_items import ANSWER_ID
from spmd_tx.coordinator.http.openai.response_schemas import ResponsesRequest
from spmd_tx.coordinator.http.text_generation.kept_turns import KeptTurns
from spmd_tx.coordinator.http.text_generation.prompts import ChatPrompt, constrained, make_prompt, traits_of
from spmd_tx.coordinator.runtime.threads import compute
from spmd_tx.coordinator.text.template_probe import TemplateTraits
from spmd_tx.errors import UnknownResponse

NO_EFFORTS = frozenset({"none", "minimal"})


async def make(
    request: ResponsesRequest,
    tools: OfferedTools,
    size: int,
    base: ServedBase,
    open_seal: OpenSeal,
    kept: KeptTurns,
) -> ChatPrompt:
    """Read a request whose body has ``size`` bytes, and make its prompt. Raises InvalidRequest."""
    variables = _variables(request, await traits_of(base))
    earlier = await _earlier(request.previous_response_id, kept)
    conversation = await compute(size, _read, request, tools, open_seal, earlier)
    constraint = await compute(size, constraint_of_response, request, conversation.tools)
    prompt = await make_prompt(conversation, variables, (), base, size, kept)
    return await constrained(prompt, constraint, base)


def offered_tools(request: ResponsesRequest) -> OfferedTools:
    """Return the tools that the model sees."""
    return read_tools([] if request.tool_choice == "none" else request.tools or [])


async def _earlier(answer_id: str | None, kept: KeptTurns) -> tuple[Message, ...]:
    """Return the conversation that ends with an answer. Raises UnknownResponse."""
    if answer_id is None:
        return ()
    conversation = await kept.conversation(f"{answer_id.removeprefix(ANSWER_ID)}:0")
    if conversation is None:
        place = "this server's memory" if kept.trajectory is None else "this trajectory"
        raise UnknownResponse(
            f"the answer {shown(answer_id)} is not in {place}, or not any more; send the whole conversation "
            "as input"
        )
    return conversation


def _read(
    request: ResponsesRequest, tools: OfferedTools, open_seal: OpenSeal, earlier: Sequence[Message]
) -> Conversation:
    are_parallel = request.parallel_tool_calls is not False
    return read_items(request.instructions, request.input, tools, are_parallel, open_seal, earlier)


def _variables(request: ResponsesRequest, traits: TemplateTraits) -> dict[str, Any]:
    """Return the variables of the chat template. What it has no variable for, clients send to all models."""
    effort = (request.reasoning or {}).get("effort")
    if effort is None:
        return {}
    if EFFORT in traits.variables:
        return {EFFORT: effort}
    if effort in NO_EFFORTS and traits.thinking_switch:
        return {traits.thinking_switch: False}
    return {}
