"""The scripts of the user guides do what the guides say."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sdk.server import BASE_MODEL, serving
from tests.support.sdk_process import run_python

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
MINUTES = 5 * 60


@pytest.fixture
def run_example(live_server):
    def run(name: str, *options: str) -> str:
        where = ["--base-url", live_server.url, "--base-model", BASE_MODEL]
        return run_python(EXAMPLES / name, *where, *options)

    return run


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+\.\d+", text)]


def test_training_lowers_the_loss_of_held_out_data_and_goes_on_where_it_was_saved(run_example):
    trained, held_out, resumed, answer = run_example("train.py").splitlines()
    first, last = numbers(trained)
    before, after = numbers(held_out)
    assert last < first
    assert after < before
    assert resumed.startswith("resumed from tinker://")
    assert numbers(resumed)[-1] == after
    assert answer.startswith("the model says: The capital of Greece is")


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--off-policy"]], ids=["on_policy", "off_policy"])
def test_a_student_comes_close_to_its_teacher(run_example, options):
    first, last = numbers(run_example("distil.py", *options).splitlines()[-1])
    assert last < first / 2


def test_a_model_answers_and_says_what_it_thinks_of_text(run_example, model_dir):
    lines = run_example("sample.py", "--tokenizer", str(model_dir)).splitlines()
    assert [line.split(" (")[0] for line in lines[:2]] == ["answer", "answer"]
    assert lines[3] == "the same seed gives the same tokens: True"
    assert numbers(lines[4])[0] < 0
    assert all(number < 0 for number in numbers(lines[6]))
    length, found = map(int, re.findall(r"\d+", lines[7]))
    assert length // 2 < found <= length


def test_every_loss_of_reinforcement_learning_has_a_gradient(run_example):
    lines = run_example("losses.py").splitlines()
    names = ["importance_sampling", "ppo", "cispo", "dro", "gspo", "stable_reinforce", "ppo, own clip"]
    assert [line.split(":")[0] for line in lines] == names
    assert all(numbers(line)[-1] > 0 for line in lines), lines
    assert lines[1].split() != lines[-1].split()


@pytest.mark.slow
def test_imitation_and_reinforcement_run_to_a_saved_state(run_example):
    *steps, answer = run_example("rl_demo.py", "--steps", "2").splitlines()
    losses = [numbers(step)[0] for step in steps if step.startswith("imitate")]
    assert losses[-1] < losses[0]
    assert [step.split(":")[0] for step in steps[-2:]] == ["reinforce 0", "reinforce 1"]
    assert answer.startswith("Tell me a tale.")


@pytest.mark.slow  # .venv/bin/pytest -m slow tests/sdk/test_guides.py -k agent
def test_an_agent_learns_which_tool_call_is_rewarded(run_example):
    rewards = [numbers(line)[0] for line in run_example("train_agent.py").splitlines()]
    assert rewards[0] <= 0.5
    assert rewards[-1] >= 0.95


@pytest.mark.slow  # .venv/bin/pytest -m slow tests/sdk/test_guides.py -k tenants
def test_two_tenants_share_a_server_and_do_not_see_each_other(model_dir, tmp_path):
    with serving(model_dir, tmp_path / "data") as server:
        server.wait_until_ready()
        command = ["sh", str(EXAMPLES / "share.sh"), server.url, BASE_MODEL, str(server.data_dir)]
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        finished = subprocess.run(command, capture_output=True, text=True, timeout=MINUTES, env=environment)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    _, of_alice, of_bob = re.split("(?:Alice|Bob)'s checkpoints:\n", finished.stdout)
    of_bob, renewed = of_bob.split("Alice's key is replaced")
    assert "weights/capitals" in of_alice
    assert "capitals" not in of_bob
    assert "train:0" in renewed
