"""Reads answers that are runs of messages with headers, as gpt-oss writes them. Pure.

A header names a channel, and the recipient of a call, as in ``<|channel|>commentary to=functions.N``.
Templates put the recipient before the channel, and models behind it; both are read. A message whose header
names neither is content, with its header.
"""

import re
from enum import Enum, auto

from spmd_tx.coordinator.text.call_syntaxes import Schemas, call_name, json_arguments
from spmd_tx.coordinator.text.markers import markers, tail
from spmd_tx.coordinator.text.reply_events import (
    BLANKS,
    Reasoning,
    ReplyCall,
    ReplyContent,
    ReplyReader,
    ReplyStatus,
)
from spmd_tx.coordinator.text.reply_formats import ReplyFormat

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
FUNCTIONS = "functions."
BETWEEN = "\n\n"  # stands between two messages of the same kind

_HEADER_PARTS = re.compile(
    r"<\|channel\|>(?P<channel>analysis|commentary|final)\b|\bto=(?P<recipient>[^\s<]+)"
    r"|<\|start\|>(?:assistant\b)?|<\|constrain\|>|\b(?:json|code)\b"
)


class _Region(Enum):
    OUTSIDE = auto()
    HEADER = auto()
    TEXT = auto()
    CALL = auto()


def _read_header(text: str) -> tuple[str, str]:
    """Return the channel and the recipient of a call that a header names; nothing for what is none."""
    if _HEADER_PARTS.sub("", text).strip(BLANKS):
        return "", ""
    parts = list(_HEADER_PARTS.finditer(text))
    channels = [part["channel"] for part in parts if part["channel"]]
    recipients = [part["recipient"] for part in parts if part["recipient"]]
    if len(channels) > 1 or len(recipients) > 1:
        return "", ""
    return "".join(channels), "".join(recipients)


class ChannelReader(ReplyReader):
    def __init__(self, format: ReplyFormat, schemas: Schemas, prompt: str) -> None:
        super().__init__(schemas)
        self._takes_calls = bool(schemas)
        self._wanted = markers(START, CHANNEL, MESSAGE, END, *format.ends)
        self._kind: type[Reasoning | ReplyContent] = ReplyContent
        self._written = set[type[Reasoning | ReplyContent]]()
        self._recipient = ""
        self._held = list[str]()
        has_begun = tail(prompt, BLANKS).endswith(f"{START}assistant")
        self._region = _Region.HEADER if has_begun else _Region.OUTSIDE

    def _end(self) -> None:
        if self._region is _Region.TEXT and self._kind is Reasoning:
            self._note(ReplyStatus.OPEN_REASONING)
        self._end_message(ReplyStatus.UNCLOSED)

    def _text(self, text: str) -> None:
        match self._region:
            case _Region.TEXT:
                self._write(self._kind, text)
            case _Region.HEADER | _Region.CALL:
                self._held.append(text)
            case _Region.OUTSIDE if text.strip(BLANKS):
                self._held, self._region = [text], _Region.HEADER
            case _Region.OUTSIDE:
                pass

    def _marker(self, marker: str) -> None:
        match marker:
            case "<|message|>" if self._region is _Region.HEADER:
                self._begin_message()
            case "<|message|>":
                self._text(marker)
            case "<|channel|>" if self._region is _Region.HEADER:
                self._held.append(marker)
            case "<|start|>" | "<|channel|>":
                self._end_message(ReplyStatus.BROKEN)
                self._held, self._region = [marker], _Region.HEADER
            case _:
                self._end_message(ReplyStatus.BROKEN)

    def _begin_message(self) -> None:
        channel, recipient = _read_header("".join(self._held))
        self._held.append(MESSAGE)
        if recipient and self._takes_calls:
            self._recipient, self._region = recipient.removeprefix(FUNCTIONS), _Region.CALL
            return
        self._region = _Region.TEXT
        self._begin_text(Reasoning if channel == "analysis" else ReplyContent)
        if recipient or not channel:
            self._write(self._kind, "".join(self._held))
        if not recipient and not channel:
            self._note(ReplyStatus.BROKEN)
        self._held = []

    def _begin_text(self, kind: type[Reasoning | ReplyContent]) -> None:
        self._drop_blanks(BETWEEN if kind in self._written else "")
        self._written.add(kind)
        self._kind = kind

    def _end_message(self, failure: ReplyStatus) -> None:
        raw = "".join(self._held)
        match self._region:
            case _Region.CALL:
                self._end_call(raw, failure)
            case _Region.HEADER if "to=" in raw or _HEADER_PARTS.sub("", raw).strip(BLANKS):
                self._begin_text(ReplyContent)
                self._write(ReplyContent, raw)
                self._note(failure if "to=" in raw else ReplyStatus.BROKEN)
            case _:
                pass
        self._end_text()
        self._held, self._region = [], _Region.OUTSIDE

    def _end_call(self, raw: str, failure: ReplyStatus) -> None:
        try:
            call = ReplyCall(call_name(self._recipient), json_arguments(raw.partition(MESSAGE)[2]))
        except (ValueError, RecursionError):
            self._begin_text(ReplyContent)
            self._write(ReplyContent, raw)
            self._note(failure)
        else:
            self._add_calls([call])
