import json
import subprocess
import sys

import pytest

PROGRAM = """
import logging, warnings
from spmd_tx.coordinator.runtime import logs

logs.log_to_stderr(FORM)
logging.getLogger("spmd_tx.anything").info("a mesh of %d", 8)
logging.getLogger("of.a.library").info("chatter")
for _ in range(3):
    logging.getLogger("opentelemetry.exporter").warning("no collector")
logs.pass_on(3, "E1123 100%: it's said")
try:
    raise ValueError("two\\nlines \\udcff")
except ValueError:
    logging.getLogger("spmd_tx.anything").exception("it failed")
warnings.warn("it is old")
raise RuntimeError("nobody has caught it")
"""


@pytest.fixture
def written():
    """Sets up the log in a form, in a process of its own, and returns the lines that it has written."""

    def written(form):
        command = [sys.executable, "-c", f"FORM = {form!r}\n{PROGRAM}"]
        ended = subprocess.run(command, capture_output=True, text=True)
        assert ended.returncode == 1
        return ended.stderr.splitlines()

    return written


def test_text_has_a_line_for_each_event_and_those_of_workers_as_they_are(written):
    event, collector, of_worker, failure, *rest = written("text")
    assert collector.endswith(" WARNING no collector")  # once, although it was logged three times
    assert event.endswith(" INFO a mesh of 8")
    assert of_worker == "worker 3: E1123 100%: it's said"
    assert failure.endswith(" ERROR it failed")
    warning = next(number for number, line in enumerate(rest) if "UserWarning: it is old" in line)
    assert rest[warning - 2 : warning] == ["ValueError: two", r"lines \udcff"]
    assert rest[-1] == "RuntimeError: nobody has caught it"


def test_json_has_an_object_for_each_event(written):
    event, _, of_worker, failure, warning, end = map(json.loads, written("json"))
    assert event.pop("time")[-6:] == "+00:00"
    assert event == {"level": "INFO", "logger": "spmd_tx.anything", "message": "a mesh of 8"}
    assert (of_worker["worker"], of_worker["message"]) == (3, "E1123 100%: it's said")
    assert failure["message"] == "it failed"
    assert failure["traceback"].endswith("ValueError: two\nlines \\udcff")
    assert "UserWarning: it is old" in warning["message"]
    assert end["level"] == "CRITICAL"
    assert end["traceback"].endswith("RuntimeError: nobody has caught it")
