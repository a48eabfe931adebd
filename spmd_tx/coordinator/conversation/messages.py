"""What a conversation consists of: messages, tools, their calls and results, in no dialect. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from spmd_tx.errors import InvalidRequest

SYSTEM, DEVELOPER, USER, ASSISTANT, TOOL = "system", "developer", "user", "assistant", "tool"
INSTRUCTING = frozenset({SYSTEM, DEVELOPER})  # roles of the same meaning
REASONING = ("reasoning_content", "reasoning", "thinking")  # its names, in dialects and in templates

Fields = Mapping[str, Any]  # of a JSON object in a request
OpenSeal = Callable[[str], str | None]  # returns the id of the turn that a client's seal names

MOST_SHOWN, MOST_CHARACTERS = 8, 80  # ids, and characters of a value, in a message about it


@dataclass(frozen=True)
class Tool:
    """Describes a function of the client."""

    name: str
    description: str
    parameters: Mapping[str, Any]  # the JSON schema of its arguments


@dataclass(frozen=True)
class ToolCall:
    """A call that the assistant has made."""

    id: str | None
    name: str
    arguments: str | Mapping[str, Any]  # as they came: JSON, or text that a model has broken; or the object


@dataclass(frozen=True)
class MessageImage:
    """An image in the text of a message."""

    at: int  # characters of the text before it
    data: str = ""  # its file in base64, as it was sent
    digest: str = ""  # of its file, once that is read, as is the next
    tokens: int = 0


@dataclass(frozen=True)
class Message:
    """One turn, or the result of one call."""

    role: str  # one of those above; a template may know others
    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str | None = None  # of the call whose result this is
    others: Mapping[str, Any] = field(default_factory=dict)  # fields of the dialect that templates may know
    turn_id: str | None = None  # REQUEST:NUMBER of the sample that it is, if its dialect has told
    images: tuple[MessageImage, ...] = ()  # in the order of their places

    @property
    def call_ids(self) -> frozenset[str]:
        """The ids of its calls that have one."""
        return frozenset(call.id for call in self.calls if call.id is not None)


@dataclass(frozen=True)
class Conversation:
    """Holds what a model is to answer."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()  # which it may call
    has_parallel_calls: bool = True  # whether it may call several in one answer
    later_tools: tuple[Tool, ...] = ()  # it may call them, too; messages describe them, not the template
    has_own_instructions: bool = False  # whether the first message counts for this answer alone

    @property
    def known_tools(self) -> tuple[Tool, ...]:
        """All tools that the model may call."""
        return self.tools + self.later_tools


def in_order_of_calls(messages: Sequence[Message]) -> list[Message]:
    """Put the results of tools in the order of their calls; clients send them as they come.

    Few templates write the ids that say which result belongs to which call. Raises InvalidRequest.
    """
    ordered: list[Message] = []
    for are_results, run in groupby(messages, key=lambda message: message.role == TOOL):
        messages_of_run = list(run)
        calls = ordered[-1].calls if ordered else ()
        ordered += _results(len(ordered), messages_of_run, calls) if are_results else messages_of_run
    return ordered


def _results(number: int, results: list[Message], calls: Sequence[ToolCall]) -> list[Message]:
    """Return results in the order of the calls of the message before them, if they name their calls."""
    places = {call.id: place for place, call in enumerate(calls)}
    named = [result.call_id is not None for result in results]
    for place, result in enumerate(results):
        if result.call_id is not None and result.call_id not in places:
            known = ", ".join(repr(id) for id in list(places)[:MOST_SHOWN]) or "none"
            raise InvalidRequest(
                f"message {number + place}: tool_call_id {shown(result.call_id)} is of no call in the "
                f"assistant's message before it, whose calls are {known}; send results right behind their "
                "calls"
            )
    return sorted(results, key=lambda result: places[result.call_id]) if all(named) else results


def shown(value: object) -> str:
    """Return a value of a client as a message about it shows it."""
    text = repr(value)
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."
