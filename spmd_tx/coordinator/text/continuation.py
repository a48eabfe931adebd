"""Continues a prompt behind a sampled turn without making the turn's text into tokens again. Pure.

The turn's tokens stay as they were sampled. What follows them is the difference of two renders of the model's
own template: one up to the turn, and one of the whole conversation. Tokenizers never merge across the marker
of a turn's end, so the tokens on its two sides can be joined.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from spmd_tx.coordinator.conversation.messages import ASSISTANT, Message
from spmd_tx.coordinator.conversation.turns import SampledTurn
from spmd_tx.coordinator.text.channel_replies import END
from spmd_tx.coordinator.text.chat_template import RenderedParts
from spmd_tx.coordinator.text.template_messages import template_messages
from spmd_tx.coordinator.text.template_probe import TemplateTraits

OPENERS = ("<|user|>", "<|observation|>")  # of messages, which end the turn before
EARLIER = "An earlier answer, 480172639."  # what a turn says in whose place another one stands
PLAIN = "..."  # what a turn says that the template cannot write as one turn; its tokens are known


@dataclass(frozen=True)
class TurnEnd:
    """Says how a sampled turn ends, and by which markers turns of its model do."""

    stop: str | None  # the special token that it ends with; None: it was cut
    markers: tuple[str, ...]
    reasoning: str = ""  # of the turn
    words: str = ""  # that the turn is found by; "": it is found by what the template writes before it


@dataclass(frozen=True)
class Tail:
    """Holds what follows a sampled turn."""

    text: str
    drops_stop: bool = False  # the template has another token in the place of the turn's last one


class TailTokens(NamedTuple):
    """Holds the tokens of a tail."""

    tokens: list[int]
    drops_stop: bool


@dataclass(frozen=True)
class TurnsToRender:
    """Holds a conversation as the template gets it, and how much of it ends with the sampled turn."""

    messages: Sequence[Mapping[str, Any]]
    known: int


def to_render(
    messages: Sequence[Message], known: int, traits: TemplateTraits, *, drops_reasoning: bool
) -> TurnsToRender | None:
    """Write a conversation whose first ``known`` messages end with a sampled turn.

    None if the template gets these messages in another way when others follow.
    """
    plain = [_as_one_turn(each, traits) if at < known else each for at, each in enumerate(messages)]
    head = template_messages(plain[:known], traits, drops_reasoning=drops_reasoning)
    whole = template_messages(plain, traits, drops_reasoning=drops_reasoning)
    return TurnsToRender(whole, len(head)) if whole[: len(head)] == head else None


def behind_plain_turn(messages: Sequence[Message]) -> tuple[tuple[Message, ...], int]:
    """Return messages behind another turn, and how many come with it, as ``to_render`` takes them.

    What follows that turn is what would follow any, where the template keeps turns as they are.
    """
    head = Message("user", PLAIN), Message(ASSISTANT, EARLIER)
    return (*head, *messages), len(head)


def _as_one_turn(message: Message, traits: TemplateTraits) -> Message:
    """Return a turn that the template writes as one: what else it says, its tokens say."""
    takes_all = len(message.calls) < 2 or traits.takes_parallel_calls
    takes_text = not (message.calls and message.text) or traits.takes_content_beside_calls
    if message.role != ASSISTANT or (takes_all and takes_text):
        return message
    return replace(message, text=message.text or PLAIN, calls=())


def tail(parts: RenderedParts, end: TurnEnd) -> Tail | None:
    """Return what follows a turn in a prompt; None if the template rewrites it."""
    whole, head = parts.whole, parts.head
    if end.words:
        _, found, behind = whole.partition(end.words)
        return _from_end(behind, (*end.markers, END), end) if found else None
    if head is None or not whole.startswith(head):
        return _tail_in(whole, parts.before, end)
    behind = whole[len(head) :]
    marker, rest = _written_end(head, end.markers)
    if marker is not None:
        return Tail(rest + behind if end.stop is not None else marker + rest + behind)
    if end.stop is None:
        return Tail(behind)
    # The template writes no end of a turn: what opens the next message ends it.
    if behind.startswith(end.stop):
        return Tail(behind[len(end.stop) :])
    return Tail(behind, drops_stop=True)


def _tail_in(whole: str, before: str | None, end: TurnEnd) -> Tail | None:
    """Find the end of a turn behind its own prompt: some templates write the last turn in another way.

    A turn whose reasoning is not there any more is rewritten.
    """
    if before is None or not whole.startswith(before):
        return None
    tail = _from_end(whole[len(before) :], end.markers, end)
    if tail is None:
        return None
    written = whole[len(before) : len(whole) - len(tail.text)]
    return tail if end.reasoning.strip() in written else None


def _from_end(text: str, markers: Collection[str], end: TurnEnd) -> Tail | None:
    """Return what follows the end of a turn that a text has first; None if there is none."""
    found = [(at, each) for each in markers if (at := text.find(each)) >= 0]
    if not found:
        return None
    at, marker = min(found)
    behind = text[at + len(marker) :]
    if end.stop is None:
        return Tail(marker + behind)
    if marker in OPENERS and marker != end.stop:
        return Tail(marker + behind, drops_stop=True)
    return Tail(behind)


def _written_end(head: str, markers: Collection[str]) -> tuple[str | None, str]:
    """Return the marker that a text ends with, and the blanks behind it."""
    visible = head.rstrip()
    marker = max((each for each in markers if visible.endswith(each)), key=len, default=None)
    return marker, head[len(visible) :] if marker is not None else ""


def path_tokens(turn: SampledTurn) -> list[int]:
    """Return the prompt of a turn, and what was sampled behind it."""
    pieces, dropped = list[np.ndarray](), 0
    for at in turn.path():
        sampled = at.sampled[: len(at.sampled) - dropped] if dropped else at.sampled
        pieces += [sampled, at.prompt]
        dropped = at.dropped
    return np.concatenate(pieces[::-1]).tolist()
