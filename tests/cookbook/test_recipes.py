"""Recipes of tinker-cookbook, unmodified and without a network, against our server: `make cookbook`.

The recipes have an environment of their own, because they need torch and the server must not.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from spmd_tx.demo import ServerLog, serving

pytestmark = [pytest.mark.cookbook, pytest.mark.timeout(1200)]

HERE = Path(__file__).parent
ENVIRONMENT = HERE.parents[1] / ".venv-cookbook"
MODEL = "Qwen/Qwen3-8B"  # by name; in the hub it is a tiny model


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    hub = ENVIRONMENT / "hub"
    assert hub.exists(), f"{hub} is not there; `make cookbook` writes it"
    offline = {"HF_HOME": str(hub), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    return {**os.environ, **offline, "TOKENIZERS_PARALLELISM": "false", "TINKER_API_KEY": "tml-cookbook"}


@pytest.fixture(scope="module")
def server(environment, tmp_path_factory):
    log = ServerLog(tmp_path_factory.mktemp("server") / "server.log")
    with serving(MODEL, log, Console(), environment) as url:
        yield url


@pytest.fixture
def run_recipe(environment, server, tmp_path):
    def run(recipe: str, **options: object) -> list[dict]:
        """Run a recipe to its end and return its metrics, a dict per step."""
        options |= {"base_url": server, "model_name": MODEL, "log_path": tmp_path / "log", "save_every": 0}
        arguments = [f"{name}={value}" for name, value in options.items()]
        python(environment, "-m", f"tinker_cookbook.recipes.{recipe}", *arguments)
        checkpoints = read_json_lines(tmp_path / "log" / "checkpoints.jsonl")
        assert [checkpoint["name"] for checkpoint in checkpoints] == ["final"]
        return read_json_lines(tmp_path / "log" / "metrics.jsonl")

    return run


def python(environment: dict[str, str], *arguments: str) -> str:
    command = [str(ENVIRONMENT / "bin" / "python"), *arguments]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stdout[-4000:] + finished.stderr[-4000:]
    return finished.stdout


def read_json_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def test_sl_loop_starts_at_the_loss_of_the_base_model_and_learns(run_recipe, environment):
    expected = float(python(environment, str(HERE / "base_model_loss.py"), MODEL, "16").splitlines()[-1])
    losses = [
        step["train_mean_nll"]
        for step in run_recipe("sl_loop", batch_size=16, max_steps=20, learning_rate=1e-3)
    ]
    print(f"sl_loop: base model {expected:.4f}, first step {losses[0]:.4f}, last step {losses[-1]:.4f}")
    assert len(losses) == 20
    assert losses[0] == pytest.approx(expected, abs=1e-2)
    assert losses[-1] < losses[0] - 2


def rl_loop_rewards(run_recipe, **options: object) -> list[float]:
    steps = run_recipe(
        "rl_loop", loss_fn="importance_sampling", batch_size=8, group_size=8, max_tokens=12, **options
    )
    rewards = [step["reward/total"] for step in steps]
    print(f"rl_loop: first five {mean(rewards[:5]):.3f}, last five {mean(rewards[-5:]):.3f}, {options}")
    return rewards


def test_rl_loop_finds_the_frequent_answer(run_recipe):
    rewards = rl_loop_rewards(run_recipe, max_steps=40, learning_rate=1e-3)
    assert len(rewards) == 40
    assert mean(rewards[:5]) <= 0.25
    assert mean(rewards[-5:]) >= 0.5


def test_rl_loop_finds_nothing_with_learning_rate_zero(run_recipe):
    rewards = rl_loop_rewards(run_recipe, max_steps=10, learning_rate=0.0)
    assert max(rewards) <= 0.25
    assert abs(mean(rewards[-5:]) - mean(rewards[:5])) < 0.1
