"""Measures how long devices wait between commands of a real server: python -m tools.bench.host_gaps

Of each kind of command it says how many there were, of how many the device had the next one when it ended
the one before, and how long it waited for the others (pauses of the client are left out). Of the scheduler it
says what CPU time its turns took, by the commands that they sent: to take in replies, to plan, to encode and
to send; and what its thread took since the turn before, with receiving and all else that it does. The first
turn of each kind does not count. decode: samples alone. train: steps sent at once. rl:
samples and steps of two clients side by side.

With --no-device commands are answered at once. On few cores this is the cost of the scheduler's work alone:
a device that computes on the same cores leaves it cold caches, and the same work takes two to three times
as long.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable, Coroutine
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from spmd_tx.coordinator.wire import tinker_pb2 as pb
from tools.bench import noting_server, noting_worker
from tools.bench.coordinator_load import PROMPT, Tenant, forward_body, open_tenant, retrieve
from tools.bench.loopback_client import PROTOBUF, connect
from tools.bench.served import serving

HERE = Path(__file__).parent
SAMPLES = 16  # of a prompt
STEPS, DATUMS, DATUM_TOKENS = 24, 8, 128  # of training
LONGEST_GAP = 0.1  # seconds; longer ones are pauses of the client
ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}

# Of a server, with so many rows, of so many tokens.
Load = Callable[[str, int, int], Coroutine[Any, Any, None]]


async def decode(url: str, rows: int, tokens: int) -> None:
    tenant = await open_tenant(url)
    async with asyncio.TaskGroup() as group:
        for number in range(1, 1 + max(1, rows // SAMPLES)):
            group.create_task(_sample(tenant, number, min(rows, SAMPLES), tokens))


async def train(url: str, rows: int, tokens: int) -> None:
    tenant, connection = await open_tenant(url), await connect(url)
    body, futures = forward_body(tenant, *[DATUM_TOKENS] * DATUMS, forward_only=False), list[str]()
    for number in range(1, 2 * STEPS, 2):
        whole = body + pb.ForwardBackwardRequest(seq_id=number).SerializeToString()
        answer = await connection.post("forward_backward", whole, PROTOBUF)
        step = {"model_id": tenant.model_id, "adam_params": ADAM, "seq_id": number + 1}
        futures += [answer.json()["request_id"], (await connection.call("optim_step", **step))["request_id"]]
    for future in futures:
        await retrieve(connection, future)
    connection.close()


async def rl(url: str, rows: int, tokens: int) -> None:
    await asyncio.gather(decode(url, rows, tokens), train(url, rows, tokens))


async def _sample(tenant: Tenant, number: int, count: int, tokens: int) -> None:
    connection = await connect(tenant.url)
    future = await connection.call(
        "asample",
        sampling_session_id=tenant.sampler_id,
        seq_id=number,
        num_samples=count,
        prompt={"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
        sampling_params={"max_tokens": tokens, "stop": []},
    )
    await retrieve(connection, future["request_id"])
    connection.close()


LOADS: dict[str, Load] = {each.__name__: each for each in (decode, train, rl)}


def lines_between(path: Path, moment: str, begin: int, end: int) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if begin <= line[moment] <= end]


def waits(commands: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the seconds that the device waited before each command, by name; 0: it had it already."""
    found: dict[str, list[float]] = {}
    for before, command in pairwise(commands):
        gap = max(0.0, (command["began"] - before["ended"]) / 1e9)
        if gap < LONGEST_GAP:
            found.setdefault(command["name"], []).append(gap)
    return found


def figures(commands: list[dict[str, Any]]) -> list[str]:
    """Return a line for each kind of command."""
    lines = []
    for name, gaps in sorted(waits(commands).items()):
        waited = [1e3 * gap for gap in gaps if gap]
        p50, p95 = np.percentile([1e3 * gap for gap in gaps], [50, 95])
        mean = np.mean(waited) if waited else 0.0
        had = 1 - len(waited) / len(gaps)
        lines.append(
            f"{name:18} {len(gaps):5} commands, {had:4.0%} there before; waits p50 {p50:.2f}, "
            f"p95 {p95:.2f} ms; {mean:.2f} ms on average of those not there"
        )
    return lines


def scheduler_figures(turns: list[dict[str, Any]]) -> list[str]:
    """Return a line for the turns of the scheduler that sent the same commands, without the first of them."""
    by_sent: dict[str, list[tuple[float, float]]] = {}
    for turn in turns:
        cpu = turn["cpu"] / 1e6, turn["all"] / 1e6
        by_sent.setdefault(", ".join(turn["sent"]) or "nothing", []).append(cpu)
    lines = []
    for sent, milliseconds in sorted(by_sent.items()):
        if len(milliseconds) > 1:
            (p50, its_thread), (p95, _) = np.percentile(milliseconds[1:], [50, 95], axis=0)
            count = len(milliseconds) - 1
            lines.append(
                f"scheduler sends {sent}: p50 {p50:.3f}, p95 {p95:.3f} ms of CPU in {count} turns; "
                f"its thread p50 {its_thread:.3f}"
            )
    return lines


def measure(name: str, rows: int, tokens: int, folder: Path, *, has_device: bool) -> list[str]:
    times, planning = folder / "times.jsonl", folder / "planning.jsonl"
    times.touch()
    os.environ |= {noting_worker.TIMES: str(times), noting_server.PLANNING: str(planning)}
    options = {"decode_rows": rows, "max_lora_adapters": 4}
    worker = HERE / ("noting_worker.py" if has_device else "instant_worker.py")
    with serving(folder, HERE / "noting_server.py", worker, **options) as server:
        asyncio.run(LOADS[name](server.url, rows, tokens))  # compiles, and does not count
        time.sleep(1.0)
        begin = time.monotonic_ns()
        asyncio.run(LOADS[name](server.url, rows, tokens))
        end = time.monotonic_ns()
    commands = lines_between(times, "began", begin, end)
    return [*figures(commands), *scheduler_figures(lines_between(planning, "at", begin, end))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("loads", nargs="*", default=list(LOADS), help=", ".join(LOADS))
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 128, 1024], help="sampled at once")
    parser.add_argument("--tokens", type=int, default=900, help="of a sample")
    parser.add_argument("--no-device", action="store_true", help="answer commands at once")
    options = parser.parse_args()
    for rows in options.rows:
        for name in options.loads:
            with tempfile.TemporaryDirectory() as folder:
                has_device = not options.no_device
                for line in measure(name, rows, options.tokens, Path(folder), has_device=has_device):
                    print(f"{name:7} {rows:5} rows  {line}", flush=True)


if __name__ == "__main__":
    main()
