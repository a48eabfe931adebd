"""One mesh over several processes brings what one device brings: losses, gradients and samples."""

import functools
import math
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from tests.support.mesh_results import results
from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]
SECONDS = 2400
TOLERANCE = 1e-5  # relative to the largest entry
EIGHT = [  # kind of model, mesh, whether base weights are split over fsdp
    *("mixture:8,1,1", "mixture:8,1,1:split", "mixture:1,8,1", "mixture:1,1,8"),
    *("mixture:2,2,2", "mixture:2,2,2:split"),
    *("dense:8,1,1", "dense:8,1,1:split", "dense:1,1,8", "dense:2,2,2", "dense:2,2,2:split"),
]
FOUR = [
    *("mixture:4,1,1:split", "mixture:1,4,1", "mixture:1,1,4", "mixture:2,2,1", "mixture:2,2,1:split"),
    *("dense:4,1,1:split", "dense:1,1,4", "dense:2,1,2", "dense:2,1,2:split"),
]


def run_mesh(processes: int, engines: list[str], file: Path) -> dict[str, np.ndarray]:
    """What process 0 has written, once all have ended."""
    devices = math.prod(map(int, engines[0].split(":")[1].split(",")))
    arguments = [processes, free_port(), devices // processes, file, *engines]
    command = [sys.executable, "-m", "tests.worker.mesh_program"]
    with ExitStack() as stack:
        logs = [stack.enter_context(open(f"{file}-{number}.log", "w+")) for number in range(processes)]
        running = [
            subprocess.Popen(
                [*command, str(process), *map(str, arguments)],
                cwd=ROOT,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
                stderr=log,
            )
            for process, log in enumerate(logs)
        ]
        for process in running:
            stack.callback(process.wait)
            stack.callback(process.kill)
        codes = [process.wait() for process in running]
        logs[0].seek(0)
        assert codes == [0] * processes, logs[0].read()[-3000:]
    return dict(np.load(file))


@functools.cache
def on_one_device(kind: str) -> dict[str, np.ndarray]:
    return results((1, 1, 1), kind, False)


def assert_the_same(found: dict[str, np.ndarray], engines: list[str]) -> None:
    for engine in engines:
        for name, wanted in on_one_device(engine.partition(":")[0]).items():
            actual = found[f"{engine}/{name}"]
            scale = np.abs(wanted).max()
            assert np.abs(actual - wanted).max() <= (0 if wanted.dtype.kind == "i" else TOLERANCE * scale), (
                f"{name} on {engine}"
            )


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("processes, engines", [(1, EIGHT), (2, EIGHT), (4, FOUR)], ids=["1", "2", "4"])
def test_processes_bring_what_one_device_brings(tmp_path, processes, engines):
    assert_the_same(run_mesh(processes, engines, tmp_path / "results.npz"), engines)
