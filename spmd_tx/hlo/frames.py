"""Reads from the text of an HLO module in which functions of the traced program an instruction was made."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
NUMBERS = {
    name: re.compile(rf"\b{name}=(\d+)")
    for name in ("file_name_id", "function_name_id", "file_location_id", "parent_frame_id")
}
DEEPEST = 64  # frames; loops repeat theirs


@dataclass(frozen=True)
class Frame:
    """Holds a function and the file that it stands in."""

    file: str
    function: str  # with those around it: "attention.<locals>.heads"


@dataclass(frozen=True)
class Frames:
    """Holds the stacks of a module."""

    places: dict[int, Frame]
    stack: dict[int, tuple[int, int]]  # of a frame: its place, and the frame that called it; 0: none

    def of(self, frame: int) -> Iterator[Frame]:
        """Yield the frames of a stack, the innermost first; none where XLA made the instruction up."""
        for _ in range(DEEPEST):
            if frame not in self.stack:
                return
            place, frame = self.stack[frame]
            if place in self.places:
                yield self.places[place]


def frames_of(text: str) -> Frames:
    """Read the tables of a module's text; a text without them has no frames."""
    tables = {name: dict(_lines(text, name)) for name in TABLES}
    files, functions = (
        {number: line.strip('"') for number, line in tables[name].items()}
        for name in ("FileNames", "FunctionNames")
    )
    places = {
        number: Frame(
            files.get(_number(line, "file_name_id"), ""),
            functions.get(_number(line, "function_name_id"), ""),
        )
        for number, line in tables["FileLocations"].items()
    }
    stack = {
        # XLA writes the caller's number plus one.
        number: (_number(line, "file_location_id"), _number(line, "parent_frame_id") - 1)
        for number, line in tables["StackFrames"].items()
    }
    return Frames(places, stack)


def _lines(text: str, table: str) -> Iterator[tuple[int, str]]:
    """Yield number and content of each line of a table."""
    match = re.search(rf"^{table}\n((?:\d+ .*\n?)+)", text, re.MULTILINE)
    for line in match[1].splitlines() if match else ():
        number, content = line.split(" ", 1)
        yield int(number), content


def _number(line: str, name: str) -> int:
    match = NUMBERS[name].search(line)
    return int(match[1]) if match else 0
