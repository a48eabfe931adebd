"""`spmd-tx train`, from a file to weights that answer."""

import json
import re
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from spmd_tx.cli import server as cli
from spmd_tx.cli.main import app
from spmd_tx.errors import StartError
from tests.sdk.server import serving
from tests.support.forked import Forked, run_spmd_tx
from tests.support.ports import free_port

TALKS = [
    ("Where is the key?", "Under the mat."),
    ("Who bakes the bread?", "The old baker."),
    ("When does it rain?", "Every morning."),
]
ENVIRONMENT = """
PROMPTS = ["Tell me a tale.", "What now?", {"prompt": "Name a bird.", "more": 1}]
EVAL_PROMPTS = [[{"role": "user", "content": "And then?"}]]


def reward(prompt, answer):
    return answer.count("o") / max(len(answer), 1)
"""


@pytest.fixture
def data(tmp_path):
    return write(
        tmp_path / "talks.jsonl",
        [
            {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}
            for asked, said in TALKS
        ],
    )


def write(path: Path, rows: list[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(server, *arguments: object) -> str:
    what, *others = map(str, arguments)
    where = ["--url", server.url, "--rank", "8"]
    return CliRunner().invoke(app, ["train", what, *where, *others], catch_exceptions=False).output


def metrics(folder: Path, name: str) -> list[float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line[name] for line in lines if name in line]


def test_a_few_lines_become_an_adapter_that_answers(live_server, data, tmp_path):
    out = tmp_path / "run"
    options = ["--batch-size", 3, "--steps", 60, "--learning-rate", 0.01, "--eval", data, "--out", out]
    printed = run(live_server, "sl", data, *options)
    before, *_, after = metrics(out, "eval/loss")
    assert after < 0.3 < 3 < before
    path = re.search(r"weights: (tinker://\S+)", printed)[1]
    body = {
        "model": path,
        "temperature": 0,
        "max_tokens": 64,
        "messages": [{"role": "user", "content": TALKS[1][0]}],
    }
    answer = httpx.post(f"{live_server.url}/oai/api/v1/chat/completions", json=body, timeout=60).json()
    assert answer["choices"][0]["message"]["content"] == TALKS[1][1]
    assert "has ended" in run(live_server, "sl", data, *options)


def test_a_killed_run_goes_on_to_the_same_numbers(live_server, data, tmp_path):
    sizes = ["--batch-size", "2", "--steps", "14", "--save-every", "4", "--learning-rate", "0.01"]
    options = ["sl", str(data), *sizes]
    where, killed = ["--rank", "8", "--url", live_server.url], tmp_path / "killed"
    with Forked(run_spmd_tx, "train", *options, *where, "--out", str(killed)) as process:
        for line in process.stdout:
            if line.startswith("step 7/"):
                process.kill()
                break
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    assert "going on" in run(live_server, *options, "--out", killed)
    run(live_server, *options, "--out", tmp_path / "whole")
    assert metrics(killed, "loss") == metrics(tmp_path / "whole", "loss")


def test_a_run_that_is_interrupted_goes_on_with_its_optimizer(live_server, data, tmp_path, monkeypatch):
    options = ["--optimizer", "dimuon", "--batch-size", 2, "--steps", 8, "--save-every", 2]
    ask = cli.Server.ask

    def interrupt(client: cli.Server, route: str, body: Any = None) -> Any:
        if body and body.get("step") == 5:
            raise KeyboardInterrupt
        return ask(client, route, body)

    whole, again = tmp_path / "whole", tmp_path / "again"
    printed = run(live_server, "sl", data, *options, "--out", whole)
    state = re.search(r"--from (tinker://\S+)", printed)[1]
    with monkeypatch.context() as until_interrupted:
        until_interrupted.setattr(cli.Server, "ask", interrupt)
        with pytest.raises(StartError, match="interrupted; the same command goes on from the last"):
            run(live_server, "sl", data, *options, "--out", again)
    with pytest.raises(StartError, match="begun with --optimizer 'dimuon', and this command says 'adamw'"):
        run(live_server, "sl", data, *options[2:], "--out", again)
    run(live_server, "sl", data, *options, "--out", again)
    assert metrics(again, "loss") == metrics(whole, "loss")
    assert metrics(again, "loss")[-1] < metrics(again, "loss")[0]
    body = {"tinker_path": state}
    info = httpx.post(f"{live_server.url}/api/v1/weights_info", json=body, timeout=60).json()
    assert info["optimizer_config"] == {"type": "dimuon", "version": 1}


@pytest.mark.slow
def test_a_run_goes_on_to_the_same_numbers_when_its_server_is_killed(model_dir, data, tmp_path, monkeypatch):
    port, ask, servers = free_port(), cli.Server.ask, []

    def start():
        servers.append(stack.enter_context(serving(model_dir, tmp_path / "data", port=port)))
        servers[-1].wait_until_ready()

    def fall(client: cli.Server, route: str, body: Any = None) -> Any:
        if len(servers) > 1 or not body or body.get("step") != 12:
            return ask(client, route, body)
        servers[0].process.kill()
        servers[0].wait()
        try:
            return ask(client, route, body)
        finally:
            start()

    options = ["--batch-size", 2, "--steps", 20, "--save-every", 5, "--learning-rate", 0.01]
    with ExitStack() as stack:
        start()
        whole, killed = tmp_path / "whole", tmp_path / "killed"
        run(servers[0], "sl", data, *options, "--out", whole)
        monkeypatch.setattr(cli.Server, "ask", fall)
        assert "weights: tinker://" in run(servers[0], "sl", data, *options, "--out", killed)
        assert len(servers) == 2
    assert len(metrics(whole, "loss")) == 20
    assert metrics(killed, "loss") == metrics(whole, "loss")


def test_preferred_answers_become_likelier(live_server, tmp_path):
    rows = [{"prompt": asked, "chosen": said, "rejected": "I do not know."} for asked, said in TALKS]
    data, out = write(tmp_path / "pairs.jsonl", rows), tmp_path / "run"
    run(
        live_server,
        "sl",
        data,
        "--batch-size",
        3,
        "--steps",
        8,
        "--learning-rate",
        0.01,
        "--eval",
        data,
        "--out",
        out,
    )
    assert metrics(out, "loss")[0] == pytest.approx(0.6931, abs=1e-4)  # ln 2: nothing is preferred yet
    assert metrics(out, "eval/accuracy")[-1] == 1
    assert metrics(out, "eval/loss")[-1] < 0.3


def test_a_reward_rises(live_server, tmp_path):
    environment, out = tmp_path / "environment.py", tmp_path / "run"
    environment.write_text(ENVIRONMENT)
    sizes = ["--batch-size", 3, "--group-size", 8, "--max-tokens", 8, "--steps", 15, "--eval-every", 10]
    printed = run(live_server, "rl", environment, *sizes, "--learning-rate", 0.01, "--out", out)
    rewards = metrics(out, "reward")
    assert sum(rewards[-5:]) > 2 * sum(rewards[:5])
    assert len(metrics(out, "eval/reward")) == 3
    name = re.search(r"weights: tinker://(.+)/sampler_weights", printed)[1]
    shown = httpx.get(f"{live_server.url}/console/api/runs/{name}", timeout=60).json()
    assert shown["health"]["state"] == "finished", shown
    samples = httpx.get(
        f"{live_server.url}/console/api/runs/{name}/samples?order=highest&limit=1", timeout=60
    )
    (best,) = samples.json()["requests"]
    assert best["samples"][0]["advantage"] > 0  # as its spans say


def test_what_cannot_be_is_said_in_one_line(live_server, data, tmp_path):
    assert "'steep' is not one of" in run(live_server, "sl", data, "--schedule", "steep")
    with pytest.raises(StartError, match="--base-model is other; the server has"):
        run(live_server, "sl", data, "--base-model", "other", "--out", tmp_path / "a")
    with pytest.raises(StartError, match=r"the run ended: .*tinker://none.*; the same command begins it"):
        run(live_server, "sl", data, "--from", "tinker://none/weights/a", "--out", tmp_path / "b")
    environment = tmp_path / "environment.py"
    environment.write_text("PROMPTS = ['a']\ndef reward(prompt, answer): return {}[answer]")
    with pytest.raises(StartError, match=r"reward raises KeyError: .*; the answer was"):
        run(live_server, "rl", environment, "--batch-size", 1, "--max-tokens", 4, "--out", tmp_path / "c")
