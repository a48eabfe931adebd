"""Measures the console: `python -m tests.console.bench --help`.

First how long its first page takes with many long runs, then how much ten open consoles slow training down.
"""

import argparse
import asyncio
import json
import resource
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import tinker
from tinker import types

from spmd_tx.demo import tiny_model
from tests.coordinator.conftest import run_services, shared_app
from tests.sdk.server import AS_USUAL, BASE_MODEL, serving
from tests.support.databases import migrate

SPEC = tiny_model.Spec(n_heads=4, n_kv_heads=2, vocab_size=384, max_positions=1024)
METRICS = {"loss:sum": 1234.5, "num_tokens:sum": 4096, "entropy:mean": 1.0, "learning_rate:mean": 1e-4}
PAGES = "runs?limit=50", "runs/s0:train:0/metrics?limit=5000", "runs/s0:train:0/timing", "server"
SECONDS = 120
START_SECONDS = 3.0  # until the consoles have read what there is


def fill(directory: Path, runs: int, steps: int) -> None:
    """Write runs with the metrics of all their steps into a new database."""
    directory.mkdir(parents=True)
    asyncio.run(migrate(None, directory))
    now = time.time()
    with sqlite3.connect(directory / "spmd_tx.db") as db:
        for run in range(runs):
            db.execute(
                "INSERT INTO sessions (id, created_at, ended_at, tags) VALUES (?, ?, ?, '[]')",
                (f"s{run}", now - run, now),
            )
            db.execute(
                "INSERT INTO models (id, session_id, base_model, rank, alpha, train_attn, train_mlp, "
                "train_unembed, created_at) VALUES (?, ?, 'tiny', 8, 8, 1, 1, 1, ?)",
                (f"s{run}:train:0", f"s{run}", now - run),
            )
            db.execute(
                "WITH RECURSIVE steps (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM steps WHERE n < ?) "
                "INSERT INTO run_metrics (line, seq_id, kind, at, metrics) "
                "SELECT ?, 2 * n, 'optim_step', ? + n, ? FROM steps",
                (steps, f"s{run}:train:0", now - steps, json.dumps(METRICS)),
            )
    db.close()


async def measure_pages(directory: Path) -> None:
    async with run_services(directory) as services:
        app = shared_app()
        app.state.services = services
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server/console/api/") as client:
            for page in PAGES:
                start = time.perf_counter()
                size = len((await client.get(page)).raise_for_status().content)
                memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
                print(f"{page}: {time.perf_counter() - start:.3f} s, {size} bytes; peak {memory} MiB")


async def console(url: str, run: str) -> None:
    """Ask for what an open page of a run asks for."""
    after = -1
    async with (
        httpx.AsyncClient(base_url=f"{url}/console/api/", timeout=SECONDS) as client,
        client.stream("GET", "stream") as stream,
    ):
        async for line in stream.aiter_lines():
            if line.startswith("data:"):
                await client.get(f"runs/{run}")
                points = (await client.get(f"runs/{run}/metrics?after={after}")).json()["points"]
                after = points[-1]["seq"] if points else after


async def consoles(url: str, run: str, count: int) -> None:
    await asyncio.gather(*(console(url, run) for _ in range(count)))


@contextmanager
def open_consoles(url: str, run: str, count: int) -> Iterator[psutil.Process]:
    """Open them in a process of their own, as they must not slow the training client down."""
    work = f"asyncio.run(bench.consoles({url!r}, {run!r}, {count}))"
    program = f"import asyncio; from tests.console import bench; {work}"
    with subprocess.Popen([sys.executable, "-c", program]) as process:
        time.sleep(START_SECONDS)
        yield psutil.Process(process.pid)
        process.kill()


def steps_per_second(trainer: tinker.TrainingClient, seconds: float) -> float:
    tokens = [1 + n % 300 for n in range(250)]
    inputs = {"target_tokens": tokens, "weights": [1.0] * len(tokens)}
    datum = types.Datum(model_input=types.ModelInput.from_ints(tokens), loss_fn_inputs=inputs)
    start, steps = time.perf_counter(), 0
    while time.perf_counter() < start + seconds:
        passed = trainer.forward_backward([datum] * 4, "cross_entropy")
        stepped = trainer.optim_step(types.AdamParams(learning_rate=1e-4))
        passed.result(SECONDS)
        stepped.result(SECONDS)
        steps += 1
    return steps / (time.perf_counter() - start)


def cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def measure_training(directory: Path, count: int, rounds: int, seconds: float) -> None:
    model = tiny_model.write(directory / "model", SPEC)
    with serving(model, directory / "data", compiled=AS_USUAL, train_tokens=1024) as server:
        server.wait_until_ready()
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-bench")
        trainer = service.create_lora_training_client(BASE_MODEL, rank=8).result(SECONDS)
        steps_per_second(trainer, seconds)
        coordinator = psutil.Process(server.process.pid)

        def measured() -> tuple[float, float]:
            """Return steps per second, and cores that the coordinator took."""
            start = cpu_seconds(coordinator)
            speed = steps_per_second(trainer, seconds)
            return speed, (cpu_seconds(coordinator) - start) / seconds

        ratios, costs, own = [], [], []
        before = measured()
        for _ in range(rounds):
            with open_consoles(server.url, trainer.model_id, count) as process:
                start = cpu_seconds(process)
                beside = measured()
                own.append((cpu_seconds(process) - start) / seconds)
            after = measured()
            alone, cost = ((one + other) / 2 for one, other in zip(before, after, strict=True))
            ratios.append(beside[0] / alone)
            costs.append(beside[1] - cost)
            print(f"{alone:.2f} steps/s alone, {beside[0]:.2f} with {count} consoles: {ratios[-1]:.3f}")
            before = after
        print(f"median ratio {statistics.median(ratios):.3f}")
        print(f"the consoles took {statistics.median(costs):.3f} cores of the coordinator")
        print(f"and {statistics.median(own):.3f} cores in their own process, on the same machine")
        service.close("success").result(SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=10_000, help="of each run")
    parser.add_argument("--consoles", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement of training")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        if options.rounds:
            measure_training(Path(directory), options.consoles, options.rounds, options.seconds)
        if options.runs:
            filled = Path(directory) / "filled"
            fill(filled, options.runs, options.steps)
            asyncio.run(measure_pages(filled))


if __name__ == "__main__":
    main()
