"""The console in Chromium, while two tenants train with recipes/rl_loop.py, unmodified."""

import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import httpx
import pytest

from tests.console.driver import drive, needs_chromium
from tests.console.test_live import create_key
from tests.cookbook.conftest import served
from tests.cookbook.cookbook import Cookbook, Run
from tests.cookbook.test_rl_loop import LEARNING_RATE, SIZES
from tests.sdk.server import COMMAND

pytestmark = [pytest.mark.cookbook, needs_chromium, pytest.mark.timeout(1200)]

SECONDS = 300  # until a run has its first step


def test_the_reward_of_an_unmodified_recipe_grows_without_a_reload(environment, tmp_path, pytestconfig):
    (tmp_path / "server").mkdir()
    keys = {owner: create_key(tmp_path / "server", owner, "user") for owner in ("alice", "bob")}
    with served("Qwen/Qwen3-8B", tmp_path, environment) as server:

        def recipes(owner: str) -> Cookbook:
            folder = tmp_path / owner
            folder.mkdir()
            theirs = {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": keys[owner]}
            return Cookbook(server, environment | theirs, folder, [])

        alice, bob = recipes("alice"), recipes("bob")
        options = SIZES | {"learning_rate": LEARNING_RATE, "loss_fn": "importance_sampling"}
        with running(alice, options, str(COMMAND), "watch", "--"), running(bob, options):
            run, others = (first_run(server.url, keys[owner]) for owner in ("alice", "bob"))
            drive("live_rl_loop", server.url, key=keys["alice"], run=run, others=others)
    logged = Run(alice.folder / "log").values("reward/total")
    assert len(logged) > 3


@contextmanager
def running(cookbook: Cookbook, options: Mapping[str, object], *watched: str) -> Iterator[None]:
    """Run rl_loop meanwhile, longer than it takes to see what is to be seen, below a command if any."""
    recipe = cookbook.command("rl_loop", "log", {**options, "max_steps": 1000})
    with ended(subprocess.Popen([*watched, *recipe], env=cookbook.environment)):
        yield


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def first_run(url: str, key: str) -> str:
    """Wait until a key's owner has a run with a step."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        answer = httpx.get(f"{url}/console/api/runs/", headers={"X-Api-Key": key}, follow_redirects=True)
        for run in answer.raise_for_status().json()["runs"]:
            if run["steps"]:
                return run["id"]
        time.sleep(1.0)
    raise TimeoutError("the recipe has made no step")
