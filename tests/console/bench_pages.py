"""Measures how long pages take with many long runs: `python -m tests.console.bench_pages --help`."""

import argparse
import asyncio
import json
import resource
import sqlite3
import tempfile
import time
from pathlib import Path

import httpx

from tests.coordinator.conftest import run_services, shared_app
from tests.support.databases import migrate

METRICS = {"loss:sum": 1234.5, "num_tokens:sum": 4096, "entropy:mean": 1.0, "learning_rate:mean": 1e-4}
METRICS |= {f"metric {number}": number + 0.123456789 for number in range(14)}
CURVES = "runs/s0:train:0/curves"
PAGES = (
    "runs?limit=50",
    "runs?limit=50&sort=changed",
    "runs?search=nowhere",
    "runs/s0:train:0/metrics?limit=5000",
    CURVES,
    f"{CURVES}?first=100&last=900",
    "runs/s0:train:0/timing",
    "server",
)


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
                answer = (await client.get(page)).raise_for_status()
                size = int(answer.headers.get("content-length", len(answer.content)))
                memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
                print(f"{page}: {time.perf_counter() - start:.3f} s, {size} bytes; peak {memory} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=10_000, help="of each run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        filled = Path(directory) / "filled"
        fill(filled, options.runs, options.steps)
        asyncio.run(measure_pages(filled))


if __name__ == "__main__":
    main()
