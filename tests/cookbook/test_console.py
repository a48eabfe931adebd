"""The console in Chromium, while two tenants train with recipes of the cookbook, unmodified."""

import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import httpx
import psutil
import pytest

from tests.console.driver import drive, needs_chromium
from tests.console.test_live import create_key
from tests.cookbook.conftest import served
from tests.cookbook.cookbook import Cookbook
from tests.sdk.server import COMMAND

pytestmark = [pytest.mark.cookbook, needs_chromium, pytest.mark.timeout(1200)]

SECONDS = 300  # until a run has its first step, and others for which a test waits
STREAMS = 16  # that an owner may have
SILENT_SECONDS = 15  # after which a client that was killed must be called silent, by the server's clock
# Small steps, and many: the recipes must not end while the pages are looked at.
RL = {"batch_size": 1, "group_size": 8, "max_tokens": 12, "learning_rate": 1e-4, "save_every": 0}
SL = {"batch_size": 1, "learning_rate": 1e-4, "save_every": 1}


def test_two_tenants_see_their_recipes_live_until_one_is_killed(environment, tmp_path):
    """Ten tabs of one of them share a stream, and live until the client is killed."""
    (tmp_path / "server").mkdir()
    keys = {owner: create_key(tmp_path / "server", owner, "user") for owner in ("alice", "bob")}
    environment |= {"SPMD_TX_LIMIT": f"console_streams={STREAMS}"}
    with served("Qwen/Qwen3-8B", tmp_path, environment) as server:

        def recipe(
            owner: str, name: str, options: Mapping[str, object], *watched: str
        ) -> subprocess.Popen[bytes]:
            folder = tmp_path / owner
            folder.mkdir()
            theirs = environment | {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": keys[owner]}
            command = Cookbook(server, theirs, folder, []).command(name, "log", dict(options))
            return subprocess.Popen([*watched, *command], env=theirs)

        watch = recipe(
            "alice", "rl_loop", {**RL, "loss_fn": "importance_sampling"}, str(COMMAND), "watch", "--"
        )
        with ended(watch), ended(recipe("bob", "sl_loop", SL)):
            mine, theirs = (first_run(server.url, keys[owner]) for owner in ("alice", "bob"))

            def kill() -> None:
                (client,) = psutil.Process(watch.pid).children()
                watch.kill()  # else it would tell the server how the client has ended
                client.kill()
                assert silence(server.url, keys["alice"], mine) <= SILENT_SECONDS

            def count() -> None:
                wait_until(lambda: streams(server.url, keys["alice"]) == 1)

            facts = {"key": keys["alice"], "other": keys["bob"], "rl": mine, "sl": theirs}
            drive("live_recipes", server.url, {"tabs": count, "kill": kill}, **facts)


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def streams(url: str, key: str) -> int:
    """Return how many streams of news an owner has: as many fewer than the limit are granted now."""
    with httpx.Client(base_url=url, headers={"X-Api-Key": key}) as client, ExitStack() as opened:
        for granted in range(STREAMS + 1):
            answer = opened.enter_context(client.stream("GET", "/console/api/stream"))
            if answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
                return STREAMS - granted
            answer.raise_for_status()
    raise AssertionError(f"there is no limit of {STREAMS} streams")


def first_run(url: str, key: str) -> str:
    """Wait until a key's owner has a run with a step."""
    found = list[str]()

    def look() -> bool:
        found.extend(run["id"] for run in told(url, key, "/")["runs"] if run["steps"])
        return bool(found)

    wait_until(look)
    return found[0]


def silence(url: str, key: str, run: str) -> int:
    """Wait until a run's client counts as silent, and return for how many seconds, as the server says."""
    health = dict[str, str]()

    def look() -> bool:
        health.update(told(url, key, f"/{run}")["health"])
        return health["state"] == "silent"

    wait_until(look)
    found = re.fullmatch(r"no heartbeat for (\d+) s", health["reason"])
    assert found is not None, health
    return int(found[1])


def told(url: str, key: str, path: str) -> dict:
    answer = httpx.get(f"{url}/console/api/runs{path}", headers={"X-Api-Key": key}, timeout=SECONDS)
    return answer.raise_for_status().json()
