"""What an answer consists of, and what all readers of answers do alike. Pure."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from spmd_tx.coordinator.text.markers import Markers, MarkerScanner

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


class ReplyReader(ABC):
    """Reads one answer, of any kind: what is no call, for all its markers, is content.

    Blanks beside markers are layout, and so they are no text.
    """

    _wanted: Markers  # what the text is split at now

    def __init__(self, tool_names: Collection[str]) -> None:
        self.status = ReplyStatus.OK  # what is wrong with the answer so far
        self._has_text = False  # whether anything but blanks was written
        self._tool_names = frozenset(tool_names)
        self._scanner = MarkerScanner()
        self._events: list[ReplyEvent] = []
        self._blanks: list[str] = []  # which are written when text follows
        self._kind_of_blanks: type[Reasoning | ReplyContent] = ReplyContent
        self._is_beside_marker = False

    def feed(self, text: str) -> list[ReplyEvent]:
        """Read more of the answer, with its special tokens, and return what is sure by now."""
        self._scanner.add(text)
        self._scan()
        events, self._events = self._events, []
        return events

    def end(self) -> list[ReplyEvent]:
        """Return what is left at the end of the answer."""
        self._text(self._scanner.rest())
        self._end()
        self._end_text()
        return self._events

    def _scan(self) -> None:
        while True:
            before, marker = self._scanner.next(self._wanted)
            self._text(before)
            if not marker:
                return
            self._marker(marker)

    @abstractmethod
    def _text(self, text: str) -> None:
        """Read text without markers; it may be empty."""

    @abstractmethod
    def _marker(self, marker: str) -> None: ...

    @abstractmethod
    def _end(self) -> None:
        """End what is open; nothing follows."""

    def _note(self, status: ReplyStatus) -> None:
        """Remember what is wrong."""
        self.status = max(self.status, status, key=_SEVERITY.index)

    def _write(self, kind: type[Reasoning | ReplyContent], text: str) -> None:
        """Write a piece of text."""
        self._kind_of_blanks = kind
        if self._is_beside_marker:
            text = text.lstrip(BLANKS)
        visible = text.rstrip(BLANKS)
        if visible:
            self._events.append(kind("".join([*self._blanks, visible])))
            self._blanks.clear()
            self._is_beside_marker, self._has_text = False, True
        if len(visible) < len(text):
            self._blanks.append(text[len(visible) :])

    def _drop_blanks(self, between: str = "") -> None:
        """Drop the blanks on both sides of a marker; ``between`` goes in front of text that follows."""
        self._blanks = [between] if between else []
        self._is_beside_marker = True

    def _add_calls(self, calls: Sequence[ReplyCall]) -> None:
        self._drop_blanks()
        self._events.extend(calls)
        self._has_text = True
        if any(call.name not in self._tool_names for call in calls):
            self._note(ReplyStatus.UNKNOWN_TOOL)

    def _end_text(self) -> None:
        """Write the blanks at the end of a text that no marker has ended."""
        if self._blanks:
            self._events.append(self._kind_of_blanks("".join(self._blanks)))
        self._drop_blanks()
