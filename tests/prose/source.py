"""Looks in docstrings and comments for the words of words.yml; `make prose` does so in pages and messages.

Usage: python -m tests.prose.source [FILE ...]. Without files it reads all of spmd_tx, tests and docs.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
WORDS = Path(__file__).with_name("words.yml")
FOLDERS = ("spmd_tx", "tests", "tools", "docs")
GENERATED = "_pb2.py"
CODE = re.compile(r"(`+).*?\1", re.DOTALL)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Hit:
    """A word that our prose does not use."""

    line: int
    found: str
    expected: str


def hits(source: str) -> list[Hit]:
    """Return the words of the list that stand in the docstrings and comments of a module."""
    found = [
        Hit(line + text[: match.start()].count("\n"), match[0], match.expand(expected))
        for line, text in (*docstrings(source), *comments(source))
        for pattern, expected in rules()
        for match in pattern.finditer(text)
    ]
    return sorted(found, key=lambda hit: hit.line)


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring, with blanks for code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            statement = node.body[0]
            assert isinstance(statement, ast.Expr)
            assert isinstance(statement.value, ast.Constant)
            yield statement.lineno, without_code(str(statement.value.value))


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each comment, with blanks for code."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], without_code(token.string)


def without_code(text: str) -> str:
    """Replace what stands in backticks by blanks, so that lines and places stay."""
    return CODE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), text)


@cache
def rules() -> list[tuple[re.Pattern[str], str]]:
    """Return each pattern of the list, with the template of what to write instead."""
    read = yaml.safe_load(WORDS.read_text())["rules"]
    return [(compiled(rule["pattern"]), re.sub(r"\$(\d)", r"\\\1", rule["expected"])) for rule in read]


def compiled(pattern: str) -> re.Pattern[str]:
    """Compile a pattern that is written as in JavaScript: between slashes, with flags behind them."""
    _, text, flags = re.split(r"^/|/(?=[a-z]*$)", pattern)
    return re.compile(text, re.IGNORECASE if "i" in flags else 0)


def main(names: Sequence[str]) -> int:
    folders = [ROOT / name for name in FOLDERS]
    files = [Path(name) for name in names] or sorted(file for each in folders for file in each.rglob("*.py"))
    count = 0
    for file in files:
        for hit in hits(file.read_text()) if not file.name.endswith(GENERATED) else ():
            print(f'{file}:{hit.line}: "{hit.found}" -> "{hit.expected}"')
            count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
