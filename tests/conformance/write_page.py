"""Runs all checks, and writes docs/tinker_api.md from the table of what they have shown.

Usage: python -m tests.conformance.write_page
"""

import subprocess
import sys
import textwrap
from collections import Counter
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

from tests.conformance.all_checks import entries
from tests.conformance.registry import TWINS, Entry, Standing

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tinker_api.md"
SDKS = ROOT / "tests" / "sdk_matrix" / "versions.txt"

COMMAND = "python -m tests.conformance.write_page"

WIDTH = 118
HEADER = ("| Call | What it does here | What is checked |", "|---|---|---|")

TITLES = {"tinker": "The `tinker` command"}

INTRODUCTION = """
A test finds the public methods of the clients and futures of `tinker` {sdk}, and all commands of its
command line, by looking at the package, and calls each, with its asynchronous twin, against a real
server with keys for two accounts. This page is written from that run. Of the methods, {methods}; of the
commands, {commands}.

Calls that are marked *local* are done by the SDK alone. Those that *cannot apply* to a self-hosted server
are refused with the error that is shown. All others work on what the owner of the key has: for what belongs
to others they get the same 404 as for an unknown ID.

A field of a request or a parameter of an address that the server does not know is refused with status 400
and its name. One that is null, false, zero or empty is taken, since newer releases send the defaults of
fields that this page lacks.
"""

OLD_SDKS = """
`make sdk-matrix` installs tinker {versions}, each in an environment of its own, and runs the same
training with each: create, forward, forward_backward with every loss that the release knows, steps,
save, resume, sample, score, download, list, delete, finish. The numbers are equal to the last digit in
all of them.

Releases before 0.25 send `forward` and `forward_backward` as JSON, and those before 0.18 read samples as
JSON, too; the server rewrites both at its edge. 0.6.3 runs all of it as well, and is left out because it
installs 5 GB of PyTorch. 0.3.0 trains and samples, but asks for checkpoints at paths that are gone since.
0.1 and 0.2 have no sessions, and are not served. Nor is `unload_model`, which no release calls by itself:
models leave the device with their session.
"""


def page() -> str:
    commands = [name for entry in entries if entry.group == "tinker" for name in entry.names]
    methods = [name for entry in entries if entry.group != "tinker" for name in entry.names]
    lines = ["# The Tinker API, method by method", "", f"<!-- Written by: {COMMAND} -->", ""]
    counts = {"methods": _count(methods), "commands": _count(commands)}
    lines += _paragraphs(INTRODUCTION, sdk=version("tinker"), **counts)
    for group, rows in groupby(entries, key=lambda entry: entry.group):
        lines += [f"## {TITLES.get(group, f'`{group}`')}", "", *HEADER, *map(_row, rows), ""]
    versions = ", ".join(SDKS.read_text().split())
    lines += ["## Other releases of the SDK", "", *_paragraphs(OLD_SDKS, versions=versions)]
    return "\n".join(lines)


def _paragraphs(text: str, **values: str) -> list[str]:
    paragraphs = text.format(**values).strip().split("\n\n")
    return [line for paragraph in paragraphs for line in (*textwrap.wrap(paragraph, WIDTH), "")]


def _count(names: list[str]) -> str:
    standing = {name: entry.standing for entry in entries for name in entry.names}
    counts = Counter(standing[name] for name in names)
    others = [
        f"{counts[kind]} {kind.value}" for kind in Standing if kind is not Standing.SERVED and counts[kind]
    ]
    return ", ".join([f"{counts[Standing.SERVED]} of {len(names)} are served", *others])


def _row(entry: Entry) -> str:
    group = "" if entry.group == "tinker" else f"{entry.group}."
    label = entry.label.removeprefix(group)
    name, _, more = label.removesuffix(TWINS).partition(" (")
    call = f"`{name}`" if entry.group != "tinker" else f"`{label}`"
    if label.endswith(TWINS):
        call += ", `…_async`"
    elif more:
        call += f" ({more}"
    standing = "" if entry.standing is Standing.SERVED else f"*{entry.standing.value.capitalize()}:* "
    return f"| {call} | {standing}{_cell(entry.does)} | {_cell(entry.effect)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    command = [sys.executable, "-m", "pytest", "-q", str(Path(__file__).parent), "-k", "not test_the_page"]
    if subprocess.run(command, cwd=ROOT).returncode:
        sys.exit(f"{PAGE} was not written: a check has failed")
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
