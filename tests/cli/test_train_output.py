import io
import json
import shlex
import sys

from rich.console import Console

from spmd_tx.cli import train_output

PATHS = "tinker://a:train:0/sampler_weights/final", "tinker://a:train:0/weights/step-000002"


def test_elsewhere_than_on_a_terminal_a_line_shows_what_has_arrived():
    shown = io.StringIO()
    with train_output.showing(Console(file=shown), 2, 0) as show:
        show(0, {"reward": 0.125, "tokens": 300.0, "seconds": 1.0})
        show(1, {"reward": 0.25, "tokens": 200.0})
        show(1, {"eval/reward": 0.0})
    lines = [line.rpartition("  ")[0] for line in shown.getvalue().splitlines()]
    assert lines == [
        "step 1/2  reward 0.125  300 tokens",
        "step 2/2  reward 0.25  200 tokens",
        "step 2/2  eval/reward 0",
    ]


def test_the_commands_at_the_end_run_as_they_are_printed(monkeypatch):
    monkeypatch.setattr(sys, "argv", [".venv/bin/spmd-tx-elsewhere", "train"])
    weights, state, ask, export = train_output.how_to_use("http://h:8000/", True, *PATHS)
    assert (weights, state) == (f"weights: {PATHS[0]}", f"to train on: --from {PATHS[1]}")
    words = shlex.split(ask.removeprefix("ask them: "))
    assert words[:2] == ["curl", "http://h:8000/oai/api/v1/chat/completions"]
    assert "Authorization: Bearer $TINKER_API_KEY" in words
    assert json.loads(words[-1])["model"] == PATHS[0]
    assert f": .venv/bin/spmd-tx-elsewhere export {PATHS[0]} --data-dir" in export
    assert "Authorization" not in train_output.how_to_use("http://h:8000", False, *PATHS)[2]
