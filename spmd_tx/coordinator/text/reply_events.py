"""What an answer consists of, and the writer that collects it. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

BLANKS = " \t\r\n"


@dataclass(frozen=True)
class Reasoning:
    """A piece of the text that the model thinks."""

    text: str


@dataclass(frozen=True)
class ReplyContent:
    """A piece of the text that the model says."""

    text: str


@dataclass(frozen=True)
class ReplyCall:
    """A whole tool call."""

    name: str
    arguments: str  # a JSON object without blanks


ReplyEvent = Reasoning | ReplyContent | ReplyCall


class ReplyStatus(StrEnum):
    """What is wrong with an answer; of several things, the last one in this list."""

    OK = "ok"
    OPEN_REASONING = "open_reasoning"  # it ends before its reasoning does
    UNKNOWN_TOOL = "unknown_tool"  # it calls a tool that the request does not have
    UNCLOSED = "unclosed"  # it ends within a call
    BROKEN = "broken"  # it has a call that cannot be read


_SEVERITY = list(ReplyStatus)


class ReplyWriter:
    """Collects the events of an answer. Blanks beside markers are layout, and so they are no text."""

    def __init__(self, tool_names: Sequence[str]) -> None:
        self.status = ReplyStatus.OK
        self.has_text = False  # whether anything but blanks was written
        self._tool_names = frozenset(tool_names)
        self._events: list[ReplyEvent] = []
        self._blanks: list[str] = []  # which are written when text follows
        self._kind: type[Reasoning | ReplyContent] = ReplyContent  # of those blanks
        self._is_beside_marker = False

    def take(self) -> list[ReplyEvent]:
        """Return the events since the last time."""
        events, self._events = self._events, []
        return events

    def note(self, status: ReplyStatus) -> None:
        """Remember what is wrong."""
        self.status = max(self.status, status, key=_SEVERITY.index)

    def write(self, kind: type[Reasoning | ReplyContent], text: str) -> None:
        """Write a piece of text."""
        self._kind = kind
        if self._is_beside_marker:
            text = text.lstrip(BLANKS)
        visible = text.rstrip(BLANKS)
        if visible:
            self._events.append(kind("".join([*self._blanks, visible])))
            self._blanks.clear()
            self._is_beside_marker, self.has_text = False, True
        if len(visible) < len(text):
            self._blanks.append(text[len(visible) :])

    def end_region(self, between: str = "") -> None:
        """Drop the blanks on both sides of a marker; ``between`` goes in front of text that follows."""
        self._blanks = [between] if between else []
        self._is_beside_marker = True

    def add_calls(self, calls: Sequence[ReplyCall]) -> None:
        """Write calls."""
        self.end_region()
        self._events.extend(calls)
        self.has_text = True
        if any(call.name not in self._tool_names for call in calls):
            self.note(ReplyStatus.UNKNOWN_TOOL)

    def end_text(self) -> None:
        """Write the blanks at the end of a text that no marker has ended."""
        if self._blanks:
            self._events.append(self._kind("".join(self._blanks)))
        self.end_region()
