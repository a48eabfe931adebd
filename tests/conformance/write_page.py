"""Runs all checks, and writes docs/tinker_api.md from the table of what they have shown.

Usage: python -m tests.conformance.write_page
"""

import sys
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

import pytest

from tests.conformance.all_checks import entries
from tests.conformance.registry import TWINS, Entry, Standing

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tinker_api.md"
SDKS = ROOT / "tests" / "sdk_matrix" / "versions.txt"

TITLES = {"tinker": "The `tinker` command"}


def page() -> str:
    commands = [name for entry in entries if entry.group == "tinker" for name in entry.names]
    methods = [name for entry in entries if entry.group != "tinker" for name in entry.names]
    lines = [
        "# The Tinker API, method by method",
        "",
        "<!-- Written by: python -m tests.conformance.write_page -->",
        "",
        f"A test walks the public methods of the clients and futures of `tinker` {version('tinker')} and all "
        "commands of its",
        "command line, and calls each, with its asynchronous twin, against a real server with two accounts. This "
        "page is",
        f"written from that run: {_count(methods)}; of the {len(commands)} commands, {_count(commands)}.",
        "",
    ]
    for group, rows in groupby(entries, key=lambda entry: entry.group):
        lines += [
            f"## {TITLES.get(group, f'`{group}`')}",
            "",
            "| Call | What it does here | What is checked |",
        ]
        lines += ["|---|---|---|", *map(_row, rows), ""]
    return "\n".join([*lines, *_old_sdks()])


def _count(names: list[str]) -> str:
    standing = {name: entry.standing for entry in entries for name in entry.names}
    parts = []
    for kind in Standing:
        number = sum(standing[name] is kind for name in names)
        if number:
            parts.append(
                f"{number} of {len(names)} are {kind.value}" if not parts else f"{number} {kind.value}"
            )
    return ", ".join(parts)


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
    return f"| {call} | {standing}{_sentence(entry.does)} | {_sentence(entry.effect)} |"


def _sentence(text: str) -> str:
    return text.replace("|", "\\|")


def _old_sdks() -> list[str]:
    versions = ", ".join(SDKS.read_text().split())
    return [
        "## Other releases of the SDK",
        "",
        f"`make sdk-matrix` installs tinker {versions},",
        "each in an environment of its own, and runs the same training with each: create, forward, "
        "forward_backward with every",
        "loss that the release knows, steps, save, resume, sample, score, list, delete, finish. The losses of all "
        "releases are",
        "equal to the last digit. Releases before 0.25 send `forward` and `forward_backward` as JSON, and those "
        "before 0.18 read",
        "samples as JSON, too; the server rewrites both at its edge. 0.3.0 trains and samples, but asks for "
        "checkpoints at paths",
        "that are gone since; 0.1 and 0.2 have no sessions, and are not served.",
        "",
    ]


if __name__ == "__main__":
    folder = str(Path(__file__).parent)
    status = pytest.main(
        ["-q", folder, "--deselect", f"{folder}/test_surface.py::test_the_page_is_what_the_checks_say"]
    )
    if status:
        sys.exit(f"{PAGE} was not written: a check has failed")
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
