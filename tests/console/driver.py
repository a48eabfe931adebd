"""Runs stories of console/test/drive.mjs in Chromium."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

CONSOLE = Path(__file__).parents[2] / "console"
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, or CHROMIUM=/path")


def drive(
    story: str, address: str, on: Mapping[str, Callable[[], object]] | None = None, **facts: str
) -> None:
    """Run a story. It fails on console errors and on serious faults that axe finds, too.

    ``on`` says what to do when the story prints a line; ``facts`` are what it must know.
    """
    command = ["node", "test/drive.mjs", story, address, str(CHROMIUM), json.dumps(facts)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=CONSOLE, **pipes) as driver:
        assert driver.stdout is not None
        for line in driver.stdout:
            print(line, end="")
            (on or {}).get(line.strip(), lambda: None)()
        _, errors = driver.communicate(timeout=200)
    assert driver.returncode == 0, errors
