"""Reads a sampled answer as it comes: its reasoning, its text, and its tool calls.

transformers has a parser for this (``utils.chat_parsing``). But it raises at a broken call, and a policy in
training writes many; a call cannot end its reasoning; it knows neither calls without a closing marker nor
messages with headers; and its own patterns take half a minute for 100,000 blanks. A record of markers for
each family, and a reader of what they enclose, take less code than bending that.
"""

from collections.abc import Sequence

from spmd_tx.coordinator.conversation.tools import Tool
from spmd_tx.coordinator.text.bare_calls import BareCallReader
from spmd_tx.coordinator.text.channel_replies import ChannelReader
from spmd_tx.coordinator.text.marked_replies import MarkedReader
from spmd_tx.coordinator.text.reply_events import (
    Reasoning,
    ReplyCall,
    ReplyContent,
    ReplyEvent,
    ReplyStatus,
    ReplyWriter,
)
from spmd_tx.coordinator.text.reply_formats import BareCalls, Channels, ReplyFormat

__all__ = ["Reasoning", "ReplyCall", "ReplyContent", "ReplyEvent", "ReplyReader", "ReplyStatus"]


class ReplyReader:
    """Reads one answer. It takes whatever a model writes; what is no call, for all its markers, is content.

    Without tools, all markers of calls are text.
    """

    def __init__(self, format: ReplyFormat, prompt: str, tools: Sequence[Tool]) -> None:
        schemas = {tool.name: tool.parameters for tool in tools}
        self._writer = ReplyWriter(list(schemas))
        match format.calls:
            case Channels():
                self._reader = ChannelReader(format, prompt, schemas, self._writer)
            case BareCalls() if tools:
                self._reader = BareCallReader(format, self._writer)
            case _:
                self._reader = MarkedReader(format, prompt, schemas, self._writer)

    def feed(self, text: str) -> list[ReplyEvent]:
        """Read more of the answer, with its special tokens, and return what is sure by now."""
        self._reader.feed(text)
        return self._writer.take()

    def end(self) -> list[ReplyEvent]:
        """Return what is left at the end of the answer."""
        self._reader.end()
        self._writer.end_text()
        return self._writer.take()

    @property
    def status(self) -> ReplyStatus:
        """What is wrong with the answer so far."""
        return self._writer.status
