"""Makes the prompt of a conversation: behind the turn that it goes on from, else as a whole."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from spmd_tx.coordinator.conversation.messages import Conversation, Message
from spmd_tx.coordinator.conversation.turn_tree import BranchCause, PlaceInTree, TurnTree
from spmd_tx.coordinator.conversation.turns import SampledTurn, own_key, settings_digest
from spmd_tx.coordinator.runtime.threads import compute
from spmd_tx.coordinator.text import continuation
from spmd_tx.coordinator.text.continuation import TailTokens, TurnEnd
from spmd_tx.coordinator.text.image_pads import widened
from spmd_tx.coordinator.text.model_text import ModelText
from spmd_tx.coordinator.text.prompt_texts import PromptTexts
from spmd_tx.coordinator.text.template_messages import template_messages, template_tools
from spmd_tx.coordinator.text.turn_reading import ReadTurn, ReplyReading, end_of_prompt, read_turn
from spmd_tx.errors import InvalidRequest

# Variables of chat templates that let them keep the reasoning of earlier turns.
KEEPING = {"clear_thinking": False, "preserve_thinking": True}


@dataclass(frozen=True)
class ConversationPrompt:
    """Holds the prompt of a conversation, and how the turns that are sampled from it are read."""

    tokens: list[int]
    place: PlaceInTree
    reused: int  # tokens, the first ones, of the turn that it goes on from
    dropped: int  # last tokens of that turn that it leaves out
    settings: bytes
    reading: ReplyReading
    asked: tuple[Message, ...]  # the messages behind that turn's, as they count for later answers

    def turn(self, model: ModelText, turn_id: str, sampled: list[int]) -> tuple[SampledTurn, ReadTurn]:
        """Return a turn that was sampled from it. Blocks for some milliseconds where it is long."""
        read = read_turn(model, self.reading, turn_id, sampled)
        before = self.place.keys[-1].digest if self.place.keys else b""
        turn = SampledTurn(
            id=turn_id,
            parent=self.place.parent,
            dropped=self.dropped,
            prompt=np.asarray(self.tokens[self.reused :], np.int32),
            sampled=np.asarray(sampled, np.int32),
            message=read.message,
            settings=self.settings,
            keys=(*self.place.new_keys, own_key(before, read.message)),
            stop=read.stop,
            is_continuable=read.is_whole,
            asked=self.asked,
        )
        return turn, read


@dataclass(frozen=True)
class PromptMaker:
    """Makes the prompts of conversations with one model."""

    base: str  # its name in the log
    model: ModelText
    texts: PromptTexts
    keeps_history: bool = False  # also where the template would write earlier turns in another way now

    async def make(
        self,
        conversation: Conversation,
        variables: Mapping[str, Any],
        tree: TurnTree,
        stops: tuple[str, ...],
        size: int,
    ) -> ConversationPrompt:
        """Make a prompt from a conversation that came in ``size`` bytes. Raises InvalidRequest.

        ``variables`` are those of the chat template, ``tree`` has the turns that it may go on from.
        """
        if self.keeps_history:
            variables = await asyncio.to_thread(self._keeping, variables)
        try:
            tools = [vars(tool) for tool in conversation.tools]
            settings = await compute(size, settings_digest, [self.base, *tools], variables)
            place = await compute(size, tree.place, conversation.messages, settings)
        except RecursionError:
            raise InvalidRequest(
                "messages, or their tools, are nested too deeply; send flatter ones"
            ) from None
        options = dict(variables)
        if conversation.tools:
            options["tools"] = await compute(size, template_tools, conversation.tools)
        behind = None if place.parent is None else await self._behind(place, place.parent, options, size)
        if behind is None:
            if place.parent is not None:
                place = place.detached(BranchCause.REWRITTEN)
            traits, drops_reasoning = self.model.template_traits, self._drops_reasoning
            messages = await compute(
                size, template_messages, conversation.messages, traits, drops_reasoning=drops_reasoning
            )
            behind = _Behind(await self.texts.of_conversation(messages, options), 0, 0)
        behind = behind._replace(tokens=self._widened(behind, place.messages[place.known :]))
        begun = await asyncio.to_thread(end_of_prompt, self.model, behind.tokens)
        most_calls = None if conversation.has_parallel_calls else 1
        reading = ReplyReading(conversation.known_tools, stops, begun, most_calls)
        first = max(place.known, int(conversation.has_own_instructions))
        return ConversationPrompt(
            behind.tokens,
            place,
            behind.reused,
            behind.dropped,
            settings,
            reading,
            place.messages[first:],
        )

    async def _behind(
        self, place: PlaceInTree, parent: SampledTurn, options: Mapping[str, Any], size: int
    ) -> "_Behind | None":
        """Return the prompt behind a turn; None if the template writes its end anew."""
        end = TurnEnd(parent.stop, tuple(self.model.turn_ends.values()), parent.message.reasoning)
        tail = await self._tail(place.messages, place.known, options, end, size)
        if tail is None and self.keeps_history:
            plain = continuation.behind_plain_turn(place.messages[place.known :])
            tail = await self._tail(*plain, options, replace(end, words=continuation.EARLIER), size)
        if tail is None:
            return None
        known = await compute(size, continuation.path_tokens, parent)
        dropped = int(tail.drops_stop)
        reused = len(known) - dropped
        return _Behind([*known[:reused], *tail.tokens], reused, dropped)

    async def _tail(
        self,
        messages: Sequence[Message],
        known: int,
        options: Mapping[str, Any],
        end: TurnEnd,
        size: int,
    ) -> TailTokens | None:
        """Return what follows the first ``known`` messages; None if that cannot be told."""
        traits, drops_reasoning = self.model.template_traits, self._drops_reasoning
        turns = await compute(
            size, continuation.to_render, messages, known, traits, drops_reasoning=drops_reasoning
        )
        return None if turns is None else await self.texts.behind_turn(turns, options, end)

    def _keeping(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Return the template's variables with those that let it keep reasoning, if it has any."""
        known = self.model.template.variables
        return {name: value for name, value in KEEPING.items() if name in known} | dict(variables)

    def _widened(self, behind: "_Behind", messages: Sequence[Message]) -> list[int]:
        """Return the tokens with as many pads for each image of the last messages as it has tokens."""
        images = [image.tokens for message in messages for image in message.images]
        pad = self.model.image_pad
        if not images or pad is None:
            return behind.tokens
        return [*behind.tokens[: behind.reused], *widened(behind.tokens[behind.reused :], pad, images)]

    @property
    def _drops_reasoning(self) -> bool:
        format = self.model.reply_format
        return format is not None and format.reasoning is not None


class _Behind(NamedTuple):
    """Holds a prompt of which the first tokens are those of a turn, without its last ``dropped`` ones."""

    tokens: list[int]
    reused: int
    dropped: int
