"""Reads a sampled answer as it comes: its reasoning, its text, and its tool calls.

transformers has a parser for this (``utils.chat_parsing``). But it raises at a broken call, and a policy in
training writes many; a call cannot end its reasoning; it knows neither calls without a closing marker nor
messages with headers; and its own patterns take half a minute for 100,000 blanks. A record of markers for
each family, and a reader of what they enclose, take less code than bending that.
"""

from collections.abc import Sequence

from spmd_tx.coordinator.conversation.messages import Tool
from spmd_tx.coordinator.text.bare_calls import BareCallReader
from spmd_tx.coordinator.text.channel_replies import ChannelReader
from spmd_tx.coordinator.text.marked_replies import MarkedReader
from spmd_tx.coordinator.text.reply_events import ReplyReader
from spmd_tx.coordinator.text.reply_formats import BareCalls, Channels, ReplyFormat


def reply_reader(format: ReplyFormat, prompt: str, tools: Sequence[Tool]) -> ReplyReader:
    """Return a reader of one answer. Without tools, all markers of calls are text."""
    schemas = {tool.name: tool.parameters for tool in tools}
    match format.calls:
        case Channels():
            return ChannelReader(format, schemas, prompt)
        case BareCalls() if tools:
            return BareCallReader(format, schemas)
        case _:
            return MarkedReader(format, schemas, prompt)
