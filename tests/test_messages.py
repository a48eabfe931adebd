"""What the program's messages advise exists: commands, options, and calls of the SDK with their arguments."""

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import tinker
import typer
from tinker.lib.public_interfaces.admin_client import AdminClient

from spmd_tx.cli.main import app
from tests.support.pages import ROOT
from tests.test_documented_commands import click_options

SPMD_TX: Any = typer.main.get_command(app)
OPTIONS_OF_OTHERS = {"--decrypt"}  # of age
CLIENTS = (
    tinker.ServiceClient,
    tinker.TrainingClient,
    tinker.SamplingClient,
    tinker.RestClient,
    AdminClient,
    tinker.Datum,
)


@cache
def messages() -> tuple[tuple[str, str], ...]:
    """All texts of the program that are no docstrings, with the line where they are written."""
    found = []
    for file in sorted((ROOT / "spmd_tx").rglob("*.py")):
        tree = ast.parse(file.read_text())
        parts = {
            id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values
        }
        skipped = {id(text) for text in docstrings(tree)} | parts
        for node in ast.walk(tree):
            text = None if id(node) in skipped else said(node)
            if text is not None and " " in text:
                found.append((f"{file.relative_to(ROOT)}:{node.lineno}", text))  # pyright: ignore[reportAttributeAccessIssue]
    return tuple(found)


def docstrings(tree: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            match node.body:
                case [ast.Expr(value), *_]:
                    yield value


def said(node: ast.AST) -> str | None:
    """A text, in which each value that is filled in is a question mark."""
    match node:
        case ast.Constant(str(text)):
            return text
        case ast.JoinedStr(values):
            return "".join(part.value if isinstance(part, ast.Constant) else "?" for part in values)
    return None


def calls() -> dict[str, list[Any]]:
    """The functions of the SDK's clients, by name."""
    found = dict[str, list[Any]]()
    for client in CLIENTS:
        for name, call in inspect.getmembers(client, callable):
            if not name.startswith("_"):
                found.setdefault(name, []).append(call)
    return found


def test_options_that_are_named_exist():
    known = click_options(SPMD_TX) | OPTIONS_OF_OTHERS | {"--help"}
    named = [
        (place, option)
        for place, text in messages()
        for option in re.findall(r"(?<!\S)--[a-z][a-z0-9-]*[a-z0-9]", text)
    ]
    assert len(named) > 100
    assert [each for each in named if each[1] not in known] == []


def test_commands_that_are_named_exist():
    named = [
        (place, *words)
        for place, text in messages()
        for words in re.findall(r"\bspmd-tx ([a-z-]+)(?: ([a-z-]+))?", text)
    ]
    assert len(named) > 5
    for place, first, second in named:
        assert first in SPMD_TX.commands, f"{place} names spmd-tx {first}"
        within = getattr(SPMD_TX.commands[first], "commands", None)
        assert within is None or second in within, f"{place} names spmd-tx {first} {second}"


# What messages name of other libraries.
OF_OTHERS = {"from_pretrained", "save_pretrained", "save_embedding_layers"}  # of transformers and PEFT


def test_calls_of_the_sdk_that_are_named_exist_and_are_not_deprecated():
    known = calls()
    verbs = {name.partition("_")[0] for name in known if "_" in name}
    named = [
        (place, name)
        for place, text in messages()
        for name in re.findall(r"\b[a-z]+(?:_[a-z]+)+\b", text)
        if name.partition("_")[0] in verbs and name not in OF_OTHERS
    ]
    named += [
        (place, name)
        for place, text in messages()
        for name in re.findall(r"\b(?:[A-Z][a-z]+Client|Datum)(?:\(\))?\.(\w+)", text)
    ]
    assert len(named) > 10
    for place, name in named:
        assert name in known, f"{place} names {name}, which the SDK does not have"
        assert not all(hasattr(call, "__deprecated__") for call in known[name]), f"{place} names {name}"


def test_arguments_of_the_sdk_that_are_named_belong_to_a_call_in_the_same_message():
    known = calls()
    named = [
        (place, text, argument)
        for place, text in messages()
        for argument in re.findall(r"\b([a-z_]+)=(?:True|False|None)\b", text)
        if argument not in OF_OTHERS
    ]
    assert named
    for place, text, argument in named:
        words = set(re.findall(r"\w+", text)) & known.keys()
        taken = {
            name for word in words for call in known[word] for name in inspect.signature(call).parameters
        }
        assert argument in taken, f"{place} names {argument}, but no call that takes it"


def test_messages_that_the_page_of_troubles_quotes_are_said():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = [quote for quote in re.findall(r"^\| [^|]*?`([^`|]+)`", page, re.MULTILINE) if " " in quote]
    assert len(quoted) > 10
    texts = [text.replace("?", "") for _, text in messages()]
    for quote in quoted:
        pieces = [piece.strip() for piece in quote.split("...") if piece.strip()]
        assert any(all(piece in text for piece in pieces) for text in texts), quote
