"""Reads answers in which calls have no markers: JSON objects at the beginning, with ``;`` between them. Pure.

An object that has no name and arguments is text: a model may answer in JSON.
"""

import re
from enum import Enum, auto

from spmd_tx.coordinator.text.call_syntaxes import Schemas, json_call
from spmd_tx.coordinator.text.markers import markers
from spmd_tx.coordinator.text.reply_events import BLANKS, ReplyContent, ReplyReader, ReplyStatus
from spmd_tx.coordinator.text.reply_formats import BareCalls, ReplyFormat

SEPARATOR = ";"


class _Region(Enum):
    START = auto()  # where a call may begin
    NEXT = auto()  # as well, behind another
    OBJECT = auto()
    TEXT = auto()


class BareCallReader(ReplyReader):
    def __init__(self, format: ReplyFormat, schemas: Schemas) -> None:
        super().__init__(schemas)
        assert isinstance(format.calls, BareCalls)
        self._opener = format.calls.opener
        self._wanted = markers(self._opener, *format.ends)
        self._held = list[str]()
        self._extent = _Extent()
        self._region = _Region.START

    def _marker(self, marker: str) -> None:
        self._end()
        if marker == self._opener:
            self._held = [marker]
        else:
            self._end_text()

    def _text(self, text: str) -> None:
        while text:
            match self._region:
                case _Region.TEXT:
                    self._write(ReplyContent, text)
                    return
                case _Region.OBJECT:
                    end = self._extent.find_end(text)
                    self._held.append(text[:end])
                    if end is None:
                        return
                    self._end_object()
                    text = text[end:]
                case _Region.START | _Region.NEXT:
                    between = BLANKS if self._region is _Region.START else BLANKS + SEPARATOR
                    rest = text.lstrip(between)
                    self._held.append(text[: len(text) - len(rest)])
                    text = rest
                    if text:
                        self._begin(text)

    def _begin(self, text: str) -> None:
        if text.startswith("{"):
            self._extent, self._region = _Extent(), _Region.OBJECT
        else:
            self._give_up()

    def _end_object(self) -> None:
        raw = "".join(self._held)
        try:
            call = json_call(raw[raw.index("{") :], needs_arguments=True)
        except (ValueError, RecursionError):
            if raw.startswith(self._opener) or '"name"' in raw:
                self._note(ReplyStatus.BROKEN)
            self._give_up()
        else:
            self._add_calls([call])
            self._held, self._region = [], _Region.NEXT

    def _end(self) -> None:
        """End what is open, at a marker or with the answer."""
        if self._region is _Region.OBJECT:
            self._note(ReplyStatus.UNCLOSED)
        if self._region is not _Region.NEXT or "".join(self._held).strip(BLANKS + SEPARATOR):
            self._give_up()
        self._held, self._region = [], _Region.START

    def _give_up(self) -> None:
        """Write what is held as it is; text follows."""
        if self._held and self._held[0] == self._opener:
            self._note(ReplyStatus.BROKEN)
        self._write(ReplyContent, "".join(self._held))
        self._held, self._region = [], _Region.TEXT


class _Extent:
    """Finds the end of a JSON object that comes in pieces."""

    _STRUCTURE = re.compile(r'\\.|\\\Z|["{}]', re.DOTALL)

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._in_escape = False

    def find_end(self, text: str) -> int | None:
        """Return the place behind the last brace; None if it has not come yet."""
        at = 1 if self._in_escape else 0
        self._in_escape = False
        for found in self._STRUCTURE.finditer(text, at):
            match found[0]:
                case '"':
                    self._in_string = not self._in_string
                case "{" | "}" if not self._in_string:
                    self._depth += 1 if found[0] == "{" else -1
                    if not self._depth:
                        return found.end()
                case "\\":
                    self._in_escape = True
        return None
