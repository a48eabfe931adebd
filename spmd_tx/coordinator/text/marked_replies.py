"""Reads answers in which markers enclose reasoning and calls. Pure."""

from enum import Enum, auto

from spmd_tx.coordinator.text.call_syntaxes import CallSyntax, Schemas
from spmd_tx.coordinator.text.markers import Markers, markers, tail
from spmd_tx.coordinator.text.reply_events import BLANKS, Reasoning, ReplyContent, ReplyReader, ReplyStatus
from spmd_tx.coordinator.text.reply_formats import ReplyFormat


class _Region(Enum):
    CONTENT = auto()
    REASONING = auto()
    CALL_IN_REASONING = auto()  # text if the reasoning ends later, else the call has ended it
    CALL = auto()


class MarkedReader(ReplyReader):
    def __init__(self, format: ReplyFormat, schemas: Schemas, prompt: str) -> None:
        super().__init__(schemas)
        self._schemas = schemas
        self._syntax = format.calls if schemas and isinstance(format.calls, CallSyntax) else None
        self._opens, self._closes = format.reasoning or ("", "")
        self._ends = frozenset(format.ends)
        self._held = list[str]()  # the raw text of a call
        self._region = _Region.CONTENT
        self._has_reasoned = False
        begun = tail(prompt, BLANKS)
        if format.reasoning and begun.endswith(format.reasoning):
            self._drop_blanks()
            self._region = _Region.REASONING if begun.endswith(self._opens) else _Region.CONTENT
        self._markers = {region: self._markers_of(region) for region in _Region}
        self._wanted = self._markers[self._region]

    def _markers_of(self, region: _Region) -> Markers:
        calls = (self._syntax.opener, *self._syntax.around) if self._syntax else ()
        match region:
            case _Region.CONTENT:
                wanted = (self._opens, *calls)
            case _Region.REASONING:
                wanted = (self._closes, *calls)
            case _Region.CALL_IN_REASONING:
                wanted = (self._closes,)
            case _Region.CALL:
                wanted = () if self._syntax is None else (self._syntax.closer or self._syntax.opener,)
        return markers(*filter(None, wanted), *self._ends)

    def _end(self) -> None:
        if self._region is _Region.CALL_IN_REASONING:
            self._reread("")
            self._wanted = self._markers[self._region]
            self._scan()
            self._text(self._scanner.rest())
        self._end_turn(ReplyStatus.UNCLOSED)

    def _text(self, text: str) -> None:
        match self._region:
            case _Region.CONTENT:
                self._write(ReplyContent, text)
            case _Region.REASONING:
                self._write(Reasoning, text)
            case _Region.CALL | _Region.CALL_IN_REASONING:
                self._held.append(text)

    def _marker(self, marker: str) -> None:
        match self._region:
            case _Region.CALL_IN_REASONING if marker in self._ends:
                self._reread(marker)
            case _ if marker in self._ends:
                self._end_turn(ReplyStatus.BROKEN)
            case _Region.CONTENT if marker == self._opens:
                if self._has_reasoned or self._has_text:
                    self._write(ReplyContent, marker)  # only what comes first is reasoning
                else:
                    self._drop_blanks()
                    self._region = _Region.REASONING
            case _Region.CONTENT if self._syntax and marker == self._syntax.opener:
                self._held, self._region = [marker], _Region.CALL
            case _Region.REASONING if marker != self._closes:
                self._held, self._region = [marker], _Region.CALL_IN_REASONING
            case _Region.CALL_IN_REASONING:
                self._write(Reasoning, "".join(self._held))
                self._end_reasoning()
            case _Region.CALL:
                self._end_call(marker)
            case _Region.REASONING:
                self._end_reasoning()
            case _Region.CONTENT:
                self._drop_blanks()
        self._wanted = self._markers[self._region]

    def _end_reasoning(self) -> None:
        self._drop_blanks()
        self._has_reasoned = True
        self._region = _Region.CONTENT

    def _reread(self, marker: str) -> None:
        """Read the call that has ended the reasoning."""
        self._scanner.put_back("".join(self._held) + marker)
        self._end_reasoning()

    def _end_turn(self, failure: ReplyStatus) -> None:
        """End what is open, with the answer."""
        if self._region is _Region.CALL:
            assert self._syntax is not None
            if self._syntax.closer is None:
                self._read_call("", failure)
            else:
                self._give_up("", ReplyStatus.UNCLOSED)
        elif self._region is _Region.REASONING:
            self._note(ReplyStatus.OPEN_REASONING)
        self._end_text()
        self._has_reasoned = True
        self._region = _Region.CONTENT

    def _end_call(self, marker: str) -> None:
        assert self._syntax is not None
        if marker == self._syntax.closer:
            self._read_call(marker, ReplyStatus.BROKEN)
            self._region = _Region.CONTENT
        else:  # the next one begins
            self._read_call("", ReplyStatus.BROKEN)
            self._held = [marker]

    def _read_call(self, closer: str, failure: ReplyStatus) -> None:
        assert self._syntax is not None
        inside = "".join(self._held[1:])
        try:
            calls = self._syntax.read(inside, self._schemas)
        except (ValueError, RecursionError):
            self._give_up(closer, failure)
        else:
            self._add_calls(calls)

    def _give_up(self, closer: str, failure: ReplyStatus) -> None:
        """Write the call as it is."""
        self._write(ReplyContent, "".join(self._held) + closer)
        self._note(failure)
