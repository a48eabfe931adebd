"""What the console says of scripts that end, of a real server and the SDK."""

import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest

from spmd_tx.demo import tiny_model
from tests.sdk.server import BASE_MODEL, COMMAND, Server, serving
from tests.sdk.shared_servers import SPEC

pytestmark = pytest.mark.console

SECONDS = 60
SAID_SECONDS = 15.0  # by which a client that has gone is called so
SCRIPT = f"""
import json, os, sys, tinker
from tinker import types
url, end = sys.argv[1:]
service = tinker.ServiceClient(base_url=url, api_key="tml-x")
trainer = service.create_lora_training_client("{BASE_MODEL}", rank=4, user_metadata={{"name": end}}).result()
tokens = list(range(1, 30))
inputs = {{"target_tokens": tokens, "weights": [1.0] * len(tokens)}}
datum = types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
trainer.forward_backward([datum], "cross_entropy").result()
trainer.optim_step(types.AdamParams(learning_rate=1e-3)).result()
with open("metrics.jsonl", "a") as file:
    print(json.dumps({{"step": 0, "reward": 0.5}}), file=file)
if end == "saved":
    trainer.save_state("last").result()
if end == "code 3":
    sys.exit(3)
if end == "SIGTERM":
    os.kill(os.getpid(), 15)
if end == "closed":
    service.close("interrupted", "enough").result()
if end == "SIGKILL":
    os.kill(os.getpid(), 9)
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model_dir = tiny_model.write(tmp_path_factory.mktemp("model"), SPEC)
    with serving(model_dir, tmp_path_factory.mktemp("ends") / "data") as made:
        made.wait_until_ready()
        yield made


def health(server: Server, name: str) -> dict[str, str]:
    """Ask for the run of a name; an answer to the same question may be a second old."""
    asked = httpx.get(f"{server.url}/console/api/runs", params={"search": name}, timeout=SECONDS)
    return next(run["health"] for run in asked.json()["runs"] if run["metadata"]["name"] == name)


@pytest.mark.parametrize(
    ("end", "state", "reason"),
    [
        ("no word", "finished", None),
        ("code 3", "errored", "the script ended with exit code 3"),
        ("SIGTERM", "interrupted", "the script got SIGTERM"),
        ("closed", "interrupted", "enough"),  # what the script has said itself
    ],
)
def test_a_watched_script_has_said_how_it_ended_when_its_command_returns(
    server, tmp_path, end, state, reason
):
    command = [COMMAND, "watch", "--url", server.url, "--", sys.executable, "-c", SCRIPT, server.url, end]
    subprocess.run(command, cwd=tmp_path, timeout=SECONDS)
    found = health(server, end)
    assert (found["state"], found["reason"]) == (state, reason)


@pytest.mark.parametrize(
    ("end", "state", "reason"),
    [("saved", "left", ", all steps are saved"), ("SIGKILL", "silent", "")],
)
def test_a_client_that_goes_without_a_word_is_told_from_one_that_is_killed(
    server, tmp_path, end, state, reason
):
    command = [sys.executable, "-c", SCRIPT, server.url, end]
    ended = subprocess.run(command, cwd=tmp_path, timeout=SECONDS, capture_output=True, text=True)
    assert (ended.returncode == 0) == (end == "saved"), ended.stderr
    until = time.monotonic() + SAID_SECONDS
    found = health(server, end)
    while found["state"] in ("running", "waiting") and time.monotonic() < until:
        time.sleep(0.2)
        found = health(server, end)
    assert found["state"] == state
    assert found["reason"].startswith("no heartbeat for ")
    assert found["reason"].endswith(f" s{reason}")
