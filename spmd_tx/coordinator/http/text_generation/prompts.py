"""Turns a conversation into a prompt, and knows how to read the replies to it: the same for all dialects."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec

from spmd_tx.bounds import Bounds
from spmd_tx.byte_sizes import show_size
from spmd_tx.coordinator.bases.served_base import ServedBase
from spmd_tx.coordinator.conversation.call_ids import call_id
from spmd_tx.coordinator.conversation.messages import Conversation, Tool
from spmd_tx.coordinator.conversation.turn_tree import TurnTree
from spmd_tx.coordinator.grammar.constraints import Constraint
from spmd_tx.coordinator.http.text_generation.choices import ChoiceProgress
from spmd_tx.coordinator.http.text_generation.detokenize import SampleText
from spmd_tx.coordinator.http.text_generation.kept_turns import Keeping, KeptTurns
from spmd_tx.coordinator.http.text_generation.replies import ReplyProgress
from spmd_tx.coordinator.images import arrival
from spmd_tx.coordinator.runtime.threads import compute
from spmd_tx.coordinator.text.conversation_prompts import PromptMaker
from spmd_tx.coordinator.text.image_pads import with_images
from spmd_tx.coordinator.text.model_text import ModelText
from spmd_tx.coordinator.text.replies import reply_reader
from spmd_tx.coordinator.text.template_probe import TemplateTraits
from spmd_tx.coordinator.text.turn_reading import end_of_prompt
from spmd_tx.coordinator.wire.sampling import ImageRef, SampleRequest
from spmd_tx.errors import InvalidRequest, WrongField

OWN_READING = (
    "send them to chat/completions as chat_template_kwargs.tools, and read the calls in the text of the "
    "answer"
)


@dataclass(frozen=True)
class ChatPrompt:
    """Holds the prompt of a conversation, and how to read the replies to it."""

    tokens: list[int]
    stops: Sequence[str]
    conversation: Conversation
    text: ModelText
    keeping: Keeping | None = None  # None: what is sampled is not kept
    grammar: str | None = None  # of the reply; None: the model writes what it likes
    images: Sequence[ImageRef] = ()  # whose tokens are pads here
    files: Mapping[str, bytes] = field(default_factory=dict)  # of the images, by digest

    def of_sample(self, sample: SampleRequest) -> SampleRequest:
        """Return the request for replies, with the images in the places of their pads."""
        sample = msgspec.structs.replace(sample, grammar=self.grammar)
        pad = self.text.image_pad
        if not self.images or pad is None:
            return sample
        return msgspec.structs.replace(sample, prompt=with_images(self.tokens, pad, self.images))

    def choice(self, index: int, request_id: str) -> ChoiceProgress:
        """Return a choice whose sample is about to be drawn."""
        tokenizer, format = self.text.tokenizer, self.text.reply_format
        if format is None:
            return ChoiceProgress(index, SampleText(tokenizer, self.stops), False)
        reader = reply_reader(format, end_of_prompt(self.text, self.tokens), self.conversation.known_tools)
        most_calls = None if self.conversation.has_parallel_calls else 1
        reply = ReplyProgress(reader, partial(call_id, request_id, index), most_calls)
        text = SampleText(tokenizer, self.stops, shows_special_tokens=True)
        return ChoiceProgress(index, text, False, reply)


async def traits_of(base: ServedBase) -> TemplateTraits:
    """Return what a model's chat template takes."""
    text = await base.model.text.get()
    return await asyncio.to_thread(lambda: text.template_traits)


async def make_prompt(
    conversation: Conversation,
    variables: Mapping[str, Any],
    stops: Sequence[str],
    base: ServedBase,
    size: int,
    kept: KeptTurns | None = None,
) -> ChatPrompt:
    """Render a conversation whose request has ``size`` bytes. Raises InvalidRequest.

    ``variables`` are those of the chat template; ``stops`` end the reply. A turn that was ``kept`` has the
    tokens that were sampled.
    """
    traits, text = await traits_of(base), await base.model.text.get()
    conversation, images, files = await compute(size, arrival.of_conversation, conversation, base.limits)
    if conversation.known_tools:
        await compute(size, _check_tools, conversation.known_tools, text, traits, base.limits.bounds)
    tree = TurnTree() if kept is None else await kept.tree(conversation, base, size)
    keeps_history = kept is not None and kept.keeps_history
    maker = PromptMaker(base.key, text, base.prompt_texts, keeps_history=keeps_history)
    made = await maker.make(conversation, variables, tree, tuple(stops), size)
    keeping = None if kept is None else Keeping(kept, tree, made, conversation, variables, base)
    return ChatPrompt(made.tokens, stops, conversation, text, keeping, images=images, files=files)


async def constrained(prompt: ChatPrompt, constraint: Constraint, base: ServedBase) -> ChatPrompt:
    """Return the prompt with the grammar of what its reply must be. Raises InvalidRequest."""
    grammar = await base.grammars.of_answer(constraint, prompt.conversation, prompt.tokens)
    return replace(prompt, grammar=grammar)


def _check_tools(tools: Sequence[Tool], text: ModelText, traits: TemplateTraits, bounds: Bounds) -> None:
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
