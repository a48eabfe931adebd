"""Reads what a whole sampled turn says, as clients are told it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from spmd_tx.coordinator.conversation.call_ids import call_id
from spmd_tx.coordinator.conversation.messages import ASSISTANT, Message, Tool, ToolCall
from spmd_tx.coordinator.text.model_text import ModelText
from spmd_tx.coordinator.text.replies import reply_reader
from spmd_tx.coordinator.text.reply_events import Reasoning, ReplyCall, ReplyContent, ReplyStatus

TAIL = 64  # tokens of a prompt, which show what a reply begins in


@dataclass(frozen=True)
class ReplyReading:
    """Says how the replies to a prompt are read."""

    tools: tuple[Tool, ...]
    stops: tuple[str, ...]  # strings that end a reply, which its client does not see
    begun: str  # the end of the prompt's text
    most_calls: int | None = None  # later ones are dropped; None: all are kept


@dataclass(frozen=True)
class ReadTurn:
    """Holds what a sampled turn says."""

    message: Message
    status: ReplyStatus
    stop: str | None  # the special token that ends it
    is_whole: bool  # False: a stop string has cut off what its tokens say


def end_of_prompt(model: ModelText, prompt: Sequence[int]) -> str:
    """Return the text that shows what a reply begins in."""
    return model.tokenizer.decode(list(prompt[-TAIL:]), skip_special_tokens=False)


def read_turn(model: ModelText, reading: ReplyReading, turn_id: str, sampled: Sequence[int]) -> ReadTurn:
    """Read a sample. Blocks for some milliseconds where it is long."""
    format = model.reply_format
    shown = model.tokenizer.decode(list(sampled), skip_special_tokens=format is None)
    places = [place for stop in reading.stops if (place := shown.find(stop)) >= 0]
    text = shown[: min(places)] if places else shown
    stop = model.turn_ends.get(sampled[-1]) if len(sampled) else None
    if format is None:
        message = Message(ASSISTANT, text, turn_id=turn_id)
        return ReadTurn(message, ReplyStatus.OK, stop, not places)
    reader = reply_reader(format, reading.begun, reading.tools)
    events = [*reader.feed(text), *reader.end()]
    request_id, _, number = turn_id.rpartition(":")
    calls = [event for event in events if isinstance(event, ReplyCall)][: reading.most_calls]
    message = Message(
        ASSISTANT,
        "".join(event.text for event in events if isinstance(event, ReplyContent)),
        "".join(event.text for event in events if isinstance(event, Reasoning)),
        tuple(
            ToolCall(call_id(request_id, int(number), place), call.name, call.arguments)
            for place, call in enumerate(calls)
        ),
        turn_id=turn_id,
    )
    return ReadTurn(message, reader.status, stop, not places)
