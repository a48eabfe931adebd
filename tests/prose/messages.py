"""Gathers what the program says, its help texts, messages and pages, as a page for the prose linter.

Usage: python -m tests.prose.messages FILE. What is filled in becomes the word "SOMETHING".
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from spmd_tx.cli.main import app

PACKAGE = Path(__file__).parents[2] / "spmd_tx"
CONSOLE = PACKAGE.parent / "console" / "src"
LOGGED = ("debug", "info", "warning", "error", "exception", "critical")
FEWEST_WORDS = 3  # shorter texts are names, not sentences


def main(page: Path) -> None:
    page.parent.mkdir(parents=True, exist_ok=True)
    texts = {
        text: place
        for place, text in (*help_texts(typer.main.get_command(app), "spmd-tx"), *messages(), *shown())
    }
    page.write_text(
        "\n\n".join(f"<!-- {place} -->\n\n{as_markdown(text)}" for text, place in texts.items()) + "\n"
    )
    print(f"wrote {len(texts)} texts to {page}")


def help_texts(command: Any, name: str) -> Iterator[tuple[str, str]]:
    if command.help:
        yield name, command.help
    for parameter in command.params:
        if text := getattr(parameter, "help", None):
            yield f"{name} {parameter.opts[0]}", text
    if hasattr(command, "list_commands"):
        context = command.context_class(command)
        for each in command.list_commands(context):
            yield from help_texts(command.get_command(context, each), f"{name} {each}")


def messages() -> Iterator[tuple[str, str]]:
    """What is raised, logged or printed, with the line where it is written."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            for call in spoken(node):
                for argument in call.args:
                    text = sentence(argument)
                    if text is not None and len(text.split()) >= FEWEST_WORDS:
                        yield f"{file.relative_to(PACKAGE.parent)}:{argument.lineno}", text


def shown() -> Iterator[tuple[str, str]]:
    """What the console's pages show: the text between tags, and strings that are sentences."""
    for file in sorted(CONSOLE.rglob("*.tsx")):
        source = file.read_text()
        tagless = re.sub(r"</?(?:code|em|strong|small|b|i|a)\b[^<>]*>", "", source)
        between = re.findall(r">([^<>{}=;]*(?:\{[^<>{}]*\}[^<>{}=;]*)*)</", tagless)
        strings = re.findall(r"\"([^\"\n]+)\"|`([^`\n]+)`", source)
        for text in (*between, *(one or other for one, other in strings)):
            said = re.sub(r"\$?\{[^{}]*\}", "SOMETHING", text).strip()
            if len(said.split()) >= FEWEST_WORDS and said[:1].isupper() and "=>" not in said:
                yield f"{file.relative_to(PACKAGE.parent)}", said


def spoken(node: ast.AST) -> Iterator[ast.Call]:
    """The calls whose arguments are messages: of an error that is raised, of a logger, of ``print``."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        yield node.exc
    elif isinstance(node, ast.Call):
        function = node.func
        is_logged = isinstance(function, ast.Attribute) and function.attr in LOGGED
        if is_logged or (isinstance(function, ast.Name) and function.id == "print"):
            yield node


def sentence(node: ast.expr) -> str | None:
    """The text of a literal, with the word "SOMETHING" for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%(\(\w+\))?[-+0-9.,]*[a-z]", "SOMETHING", node.value)
    if isinstance(node, ast.JoinedStr):
        parts = [sentence(each) if isinstance(each, ast.Constant) else "SOMETHING" for each in node.values]
        return "".join(part or "" for part in parts)
    return None


def as_markdown(text: str) -> str:
    """One line, in which no character means anything to Markdown."""
    return re.sub(r"([<>*_`#\[\]|\\])", r"\\\1", re.sub(r"\s+", " ", text.strip()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
