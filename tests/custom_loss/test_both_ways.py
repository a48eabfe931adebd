"""Real losses through the real SDK, on the server and in the client; in the environment of `make cookbook`.

.venv/bin/pytest -s -m cookbook tests/custom_loss
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from spmd_tx.demo import tiny_model
from spmd_tx.demo.run import ServerLog, serving

pytestmark = [pytest.mark.cookbook, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-cookbook" / "bin" / "python"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    model = tiny_model.write(tmp_path_factory.mktemp("model") / "tiny", tiny_model.Spec())
    log = ServerLog(tmp_path_factory.mktemp("server") / "server.log")
    options = {"SPMD_TX_MAX_LORA_ADAPTERS": "64", "SPMD_TX_TRAIN_TOKENS": "256"}
    with serving(str(model), log, Console(), os.environ | options) as url:
        yield url, str(model)


def run(server, *command):
    url, model = server
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    filled = [part.format(url=url, model=model) for part in command]
    finished = subprocess.run(
        [str(PYTHON), *filled], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-4000:]
    return finished.stdout.splitlines()


def test_losses_on_the_server_are_those_in_the_client(server):
    lines = run(server, "-m", "tests.custom_loss.both_ways", "{url}", "{model}")
    print("\n".join(lines))
    losses = [json.loads(line) for line in lines]
    assert len(losses) == 16
    for each in losses:
        differences = {name: each[name] for name in ("metrics", "logprobs", "gradient_norm", "after")}
        assert max(differences.values()) <= 1e-5, each
        assert each["moved"] > 1e-4


def test_the_example_of_the_documentation_learns_what_is_preferred(server):
    lines = run(server, "docs/examples/custom_loss.py", "--base-url", "{url}", "--base-model", "{model}")
    print("\n".join(lines))
    assert "loss 2.0794, margin 0.0000" in lines[0]  # three times log 2
    assert "accuracy 1.00" in lines[-1]
