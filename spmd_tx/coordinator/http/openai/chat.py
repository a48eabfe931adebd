"""Turns a chat into a prompt, and knows how to read the replies to it."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from spmd_tx.bounds import Bounds
from spmd_tx.byte_sizes import show_size
from spmd_tx.coordinator.conversation.call_ids import call_id
from spmd_tx.coordinator.conversation.chat_reader import read_conversation
from spmd_tx.coordinator.conversation.messages import Conversation
from spmd_tx.coordinator.http.openai.choices import ChoiceProgress
from spmd_tx.coordinator.http.openai.detokenize import SampleText
from spmd_tx.coordinator.http.openai.replies import ReplyProgress
from spmd_tx.coordinator.http.openai.requests import stop_strings
from spmd_tx.coordinator.http.openai.schemas import ChatRequest
from spmd_tx.coordinator.runtime.threads import compute
from spmd_tx.coordinator.text.model_text import ModelText
from spmd_tx.coordinator.text.prompt_texts import PromptTexts
from spmd_tx.coordinator.text.replies import ReplyReader
from spmd_tx.coordinator.text.template_messages import template_messages, template_tools
from spmd_tx.coordinator.text.template_probe import TemplateTraits
from spmd_tx.errors import InvalidRequest, WrongField

EFFORT = "reasoning_effort"
NO_EFFORT = "none"
OWN_READING = "send them as chat_template_kwargs.tools, and read the calls in the text of the answer"
TAIL = 64  # tokens of a prompt, which show what a reply begins in


@dataclass(frozen=True)
class ChatPrompt:
    """Holds the prompt of a chat, and how to read the replies to it."""

    tokens: list[int]
    request: ChatRequest
    conversation: Conversation
    text: ModelText

    def choice(self, index: int, request_id: str) -> ChoiceProgress:
        """Return a choice whose sample is about to be drawn."""
        tokenizer, format, stops = self.text.tokenizer, self.text.reply_format, stop_strings(self.request)
        if format is None:
            return ChoiceProgress(index, SampleText(tokenizer, stops), False)
        begun = tokenizer.decode(self.tokens[-TAIL:], skip_special_tokens=False)
        reader = ReplyReader(format, begun, self.conversation.tools)
        most_calls = None if self.conversation.has_parallel_calls else 1
        reply = ReplyProgress(reader, partial(call_id, request_id, index), most_calls)
        return ChoiceProgress(index, SampleText(tokenizer, stops, shows_special_tokens=True), False, reply)


async def read(
    request: ChatRequest, size: int, text: ModelText, texts: PromptTexts, bounds: Bounds
) -> ChatPrompt:
    """Read a chat whose body has ``size`` bytes, and make its prompt. Raises InvalidRequest."""
    format, traits = await asyncio.to_thread(lambda: (text.reply_format, text.template_traits))
    tools = [] if request.tool_choice == "none" else request.tools or []
    if tools:
        _check_tools(tools, text, traits, bounds)
    options = _options(request, traits)
    are_parallel = request.parallel_tool_calls is not False
    conversation = await compute(size, read_conversation, request.messages, tools, are_parallel)
    if conversation.tools:
        options["tools"] = template_tools(conversation.tools)
    messages = await compute(
        size,
        template_messages,
        conversation.messages,
        traits,
        drops_reasoning=format is not None and format.reasoning is not None,
    )
    tokens = await texts.of_conversation(messages, options)
    return ChatPrompt(tokens, request, conversation, text)


def _check_tools(
    tools: list[dict[str, Any]], text: ModelText, traits: TemplateTraits, bounds: Bounds
) -> None:
    format = text.reply_format
    if format is None or format.calls is None or not traits.shows_tools:
        why = (
            "its chat template does not show them"
            if not traits.shows_tools
            else "how it writes tool calls is not known"
        )
        raise WrongField(f"tools is not offered for this model: {why}; {OWN_READING}", "tools")
    size = len(msgspec.json.encode(tools))
    if size > bounds.tools_bytes:
        raise InvalidRequest(
            f"tools has {show_size(size)} as JSON; at most {show_size(bounds.tools_bytes)} are allowed, so "
            "send fewer or shorter ones (the operator raises the limit tools_bytes)"
        )


def _options(request: ChatRequest, traits: TemplateTraits) -> dict[str, Any]:
    """Return the variables of the chat template."""
    return {**_effort(request.reasoning_effort, traits), **(request.chat_template_kwargs or {})}


def _effort(effort: str | None, traits: TemplateTraits) -> Mapping[str, Any]:
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
