"""Old and new SDKs, each in its own environment, run the same training with the same numbers."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from spmd_tx.demo import tiny_model
from tests.sdk.server import BASE_MODEL, Server, serving
from tests.sdk.shared_servers import SPEC

pytestmark = pytest.mark.sdk_matrix

ENVIRONMENTS = Path(__file__).parents[2] / ".venv-sdk"
FLOW = Path(__file__).with_name("flow.py")
VERSIONS = (Path(__file__).with_name("versions.txt")).read_text().split()
NEWEST = VERSIONS[-1]
STEPS = (
    "capabilities create forward forward_backward optim_step save_state resume load_state save_for_sampler "
    "sample compute_logprobs failure download checkpoints finish"
).split()

Results = dict[str, dict]  # by step


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model_dir = tiny_model.write(tmp_path_factory.mktemp("model"), SPEC)
    slots = 4 * len(VERSIONS)  # SDKs before 0.27 do not say when they are done
    with serving(
        model_dir, tmp_path_factory.mktemp("matrix") / "data", max_lora_adapters=slots, max_lora_rank=8
    ) as server:
        server.wait_until_ready()
        yield server


@pytest.fixture(scope="module")
def table() -> Iterator[dict[str, Results]]:
    """What each release has done so far; printed at the end."""
    table: dict[str, Results] = {}
    yield table
    lines = [f"{'SDK':18}" + "".join(f"{version:>9}" for version in table)]
    for name in STEPS:
        cells = [_cell(results.get(name)) for results in table.values()]
        lines.append(f"{name:18}" + "".join(f"{cell:>9}" for cell in cells))
    print("\n" + "\n".join(lines) + "\n(seconds per step)")


@pytest.fixture(scope="module")
def newest(server: Server, table: dict[str, Results]) -> Results:
    return _run(NEWEST, server, table)


def test_the_newest_sdk_runs_all_steps(newest):
    assert not [result for result in newest.values() if "error" in result]
    assert list(newest) == STEPS


@pytest.mark.parametrize("version", VERSIONS[:-1])
def test_an_older_sdk_runs_all_steps_with_the_same_numbers(version, server, table, newest):
    results = _run(version, server, table)
    assert not [result for result in results.values() if "error" in result]
    assert list(results) == STEPS
    for name in set(STEPS) - {"forward_backward", "finish"}:
        assert results[name]["value"] == newest[name]["value"], name
    losses = results["forward_backward"]["value"]
    assert losses.keys() >= {"cross_entropy", "importance_sampling", "ppo"}
    assert losses.items() <= newest["forward_backward"]["value"].items()


def _run(version: str, server: Server, table: dict[str, Results]) -> Results:
    python = ENVIRONMENTS / version / "bin" / "python"
    assert python.exists(), f"there is no environment for tinker {version}; run: make sdk-matrix"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    ended = subprocess.run(
        [python, FLOW, server.url, BASE_MODEL],
        stdout=subprocess.PIPE,
        text=True,
        env=environment | {"HF_HUB_OFFLINE": "1"},
        timeout=240,
        check=True,
    )
    answer = json.loads(ended.stdout.splitlines()[-1])
    assert answer["version"] == version
    table[version] = answer["steps"]
    return answer["steps"]


def _cell(result: dict | None) -> str:
    if result is None:
        return "-"
    return "FAILED" if "error" in result else f"{result['seconds']:.2f}"
