"""Measures the console's lists and curves of large runs: python -m tools.bench.large_runs [--runs N]

Fills a data directory with three runs of 18 metrics and many of six, each of so many steps. The first run of
each kind is written as the server writes results; the others are copies of it. Then a server serves them, and
each question is asked twice: for the first time, and again. Prints seconds, and the server's CPU seconds.
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import httpx
import psutil
from sqlalchemy import insert, literal, select

from spmd_tx.coordinator.http.security.turns import MOST_REST_SECONDS
from spmd_tx.coordinator.requests.records import Finished, NewOutcome, Request, RequestTimes
from spmd_tx.coordinator.requests.runs import run_metrics
from spmd_tx.coordinator.storage.database import Database, open_database
from spmd_tx.coordinator.storage.tables import ModelRow, RunMetrics, SessionRow
from spmd_tx.demo import tiny_model
from tests.sdk.server import serving
from tests.sdk.shared_servers import SPEC

PASS = ("loss:sum", "num_datums:sum", "num_tokens:sum", "kl:mean", "entropy:mean", "ratio:max")
MORE = tuple(f"clipped/{part}:mean" for part in "abcdefghij")
STEP = ("learning_rate:mean", "unclipped_grad_l2:mean")
AT_ONCE = 1000  # steps of a transaction
COPIED = tuple(column for column in RunMetrics.__table__.columns if column.name not in ("number", "line"))
SECONDS = 600


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--database-url")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data_dir, began = Path(folder) / "data", time.monotonic()
        asyncio.run(fill(data_dir, options.database_url, options.runs, options.steps))
        print(f"filled in {time.monotonic() - began:.0f} s", flush=True)
        model_dir = tiny_model.write(Path(folder) / "model", SPEC)
        url = {} if options.database_url is None else {"database_url": options.database_url}
        with serving(model_dir, data_dir, **url) as server:
            server.wait_until_ready()
            measure(server.url, psutil.Process(server.process.pid))


async def fill(data_dir: Path, url: str | None, runs: int, steps: int) -> None:
    """Write the runs, the widest last, so that they are the newest."""
    database, now = await open_database(url, data_dir), time.time()
    names = [f"s{number}:train:0" for number in range(runs + 3)]
    async with database.transaction() as db:
        await db.execute(insert(SessionRow), [session(name, now) for name in names])
        await db.execute(insert(ModelRow), [model(name, now + place) for place, name in enumerate(names)])
    for passed, lines in ((PASS[:4], names[:runs]), (PASS + MORE, names[runs:])):
        if lines:
            await write(database, lines[0], passed, steps)
        for number, line in enumerate(lines[1:], 2):
            async with database.transaction() as db:
                rows = select(literal(line), *COPIED).where(RunMetrics.line == lines[0])
                columns = ["line", *(column.name for column in COPIED)]
                await db.execute(insert(RunMetrics).from_select(columns, rows.order_by(RunMetrics.number)))
            if number % 50 == 0:
                print(f"{number} of {len(lines)} runs filled, {time.time() - now:.0f} s", flush=True)
    await database.close()


async def write(database: Database, line: str, passed: tuple[str, ...], steps: int) -> None:
    """Write a run as results are written: a pass and an update of each step."""
    for first in range(0, steps, AT_ONCE):
        settled = [
            NewOutcome(
                Request(
                    0, "", "optim_step" if is_step else "forward_backward", line, 2 * step + is_step + 1, ""
                ),
                Finished("", b"", metrics=dict.fromkeys(STEP if is_step else passed, 1 / (step + 3))),
                RequestTimes(),
                0,
            )
            for step in range(first, min(steps, first + AT_ONCE))
            for is_step in (False, True)
        ]
        await database.write(lambda db, _, settled=settled: run_metrics.add(db, settled))


def session(name: str, now: float) -> dict[str, object]:
    ended = {"ended_at": now - 60, "ended_because": "its client finished: success"}
    return {"id": name.partition(":")[0], "created_at": now - 3600, "tags": [], **ended}


def model(name: str, now: float) -> dict[str, object]:
    trained = dict.fromkeys(("train_attn", "train_mlp", "train_unembed"), True)
    return {
        "id": name,
        "session_id": name.partition(":")[0],
        "base_model": "tiny",
        "rank": 4,
        "alpha": 32.0,
        "created_at": now - 3600,
        "user_metadata": {"name": f"sweep {name}", "learning_rate": 1e-4},
        **trained,
    }


def measure(url: str, coordinator: psutil.Process) -> None:
    client = httpx.Client(base_url=f"{url}/console/api/runs", timeout=SECONDS)
    listed = client.get("/", params={"limit": 50}).json()["runs"]
    widest = [run["id"] for run in listed[:3]]
    questions = {
        "first page": "/?limit=50",
        "last changed": "/?limit=50&sort=changed",
        "search": "/?limit=50&search=sweep+s7",
        "search, nothing found": "/?limit=50&search=nothing",
        "a run": f"/{widest[0]}",
        **{f"curves of {name}": f"/{name}/curves" for name in widest},
    }
    for name, question in questions.items():
        for when in ("first", "again"):
            time.sleep(MOST_REST_SECONDS)  # for which an owner may have to wait after an answer
            spent, began = sum(coordinator.cpu_times()[:2]), time.monotonic()
            size = len(client.get(question).raise_for_status().content)
            seconds, cpu = time.monotonic() - began, sum(coordinator.cpu_times()[:2]) - spent
            print(f"{name}, {when}: {seconds:.2f} s, CPU {cpu:.2f} s, {size} bytes", flush=True)


if __name__ == "__main__":
    main()
