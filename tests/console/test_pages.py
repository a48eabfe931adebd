import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.console import stand_in

CONSOLE = Path(__file__).parents[2] / "console"
CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")

pytestmark = [
    pytest.mark.console,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, or CHROMIUM=/path"),
]


def drive(story: str, address: str) -> None:
    """Run a story of drive.mjs, which fails on console errors and on serious faults that axe finds, too."""
    command = ["node", "test/drive.mjs", story, address, str(CHROMIUM)]
    done = subprocess.run(command, cwd=CONSOLE, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("story", ["runs", "run", "not_found", "phone"])
def test_a_page_works(story):
    with stand_in.serving() as address:
        drive(story, address)


def test_a_page_asks_for_a_key():
    with stand_in.serving(needs_key=True) as address:
        drive("sign_in", address)
