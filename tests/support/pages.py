"""Reads the pages of the documentation: their blocks of code, code within sentences, and shell commands."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

SHELLS = ("sh", "bash")
END_OF_COMMAND = re.compile(r"[;&|]+")
FENCE = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block; ``language`` is empty where none is given."""

    language: str
    text: str


@dataclass(frozen=True)
class ShellCommand:
    """A command as somebody would type it; ``is_whole`` is false where some of it may be left out."""

    program: str
    arguments: tuple[str, ...]
    is_whole: bool

    def __str__(self) -> str:
        return shlex.join([self.program, *self.arguments])


def blocks(page: Path) -> list[Block]:
    return [Block(*found) for found in FENCE.findall(page.read_text())]


def inline_codes(page: Path) -> list[str]:
    """The code within a page's sentences and tables, each on one line."""
    text = COMMENT.sub("", FENCE.sub("", page.read_text()))
    return [re.sub(r"\s+", " ", code).strip() for code in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]


def shell_commands(page: Path, programs: set[str]) -> Iterator[ShellCommand]:
    """The commands of a page: all of its shell blocks, and those of ``programs`` that stand elsewhere."""
    for block in blocks(page):
        lines = block.text.replace("\\\n", " ").splitlines()
        if prompts := [line[2:] for line in lines if line.startswith("$ ")]:
            lines = prompts  # the rest of the block is output
        for command in (each for line in lines for each in parse(line)):
            if block.language in SHELLS or (not block.language and command.program in programs):
                yield command
    for code in inline_codes(page):
        if re.match(r"\S+ ", code) and code.split()[0] in programs:
            yield from parse(code, is_whole=False)


def parse(line: str, *, is_whole: bool = True) -> Iterator[ShellCommand]:
    """Split a line at ``&&``, ``|`` and ``;``; comments, redirections and ``...`` are left out."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    try:
        words = list(lexer)
    except ValueError:  # an apostrophe in a block that is no shell's
        return
    command: list[str] = []
    for word in [*words, ";"]:
        if not END_OF_COMMAND.fullmatch(word):
            command.append(word)
            continue
        if ">" in command or "<" in command:
            command = command[: min(command.index(each) for each in "<>" if each in command)]
        if parts := [part for part in command if part != "..."]:
            program = next((at for at, part in enumerate(parts) if not re.match(r"[A-Z_]+=", part)), None)
            if program is not None:
                arguments = tuple(parts[program + 1 :])
                yield ShellCommand(parts[program], arguments, is_whole and len(parts) == len(command))
        command = []
