"""Measures what many tenants cost: python -m tools.bench.tenants [--quick]

Each has a session, an adapter and a saved version of it. Prints, for 1 to 32 of them, latency, memory and
their throughput together; then how long a sample of 4 tokens takes beside one of 1,500.
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tinker

from tools.bench import charts, models, tables
from tools.bench.client import Client, sample_soon, timed, train_soon
from tools.bench.servers import Server, ours

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "performance_measured.md"
VOCABULARY = models.SPECS["tiny"].vocab_size
COUNTS = (1, 2, 4, 8, 16, 32)
STEPS, ROWS, ROW_TOKENS = 32, 8, 128  # training steps of all tenants together
PROMPTS, COPIES, ANSWER = 32, 4, 64  # prompts of all tenants together
LONG, SHORT = 1500, 4  # tokens
SECONDS = 600.0  # to wait for anything


@dataclass(frozen=True)
class Tenant:
    client: Client
    trainer: tinker.TrainingClient
    sampler: tinker.SamplingClient


def main() -> None:
    arguments = _arguments()
    out: Path = arguments.out.absolute()
    shutil.rmtree(out, ignore_errors=True)
    model = models.write("tiny", out)
    cache = (arguments.our_cache or out / "cache").absolute()
    options = ["--max-lora-adapters", str(max(arguments.counts))]
    server = Server(
        lambda port: ours(Path(sys.executable), model, port, out / "server", cache, options),
        out / "server.log",
    )
    try:
        server.wait_until_healthy(SECONDS)
        server.wait_until_idle(arguments.settle_seconds)
        report = measure(server, str(model), arguments.counts, arguments.rounds)
    finally:
        server.close()
    report["load"] = round(os.getloadavg()[0], 1)
    (out / "tenants.json").write_text(json.dumps(report, indent=1) + "\n")
    print(text(report), flush=True)
    if arguments.publish:
        (PAGE.parent / "performance_tenants.svg").write_text(chart(report))
        tables.publish(PAGE, "tools.bench.tenants", markdown(report))


def measure(server: Server, model: str, counts: Sequence[int], rounds: int) -> dict[str, Any]:
    """All figures: by number of tenants, then of the two samples side by side."""
    tenants: list[Tenant] = []
    growth: dict[str, list[float]] = {"latency_ms": [], "memory_mib": []}
    for count in counts:
        tenants += [new_tenant(server.url, model, number) for number in range(len(tenants), count)]
        growth["latency_ms"].append(latency_ms(tenants))
        growth["memory_mib"].append(server.rss_mib())
        print(f"{count} tenants: {growth['latency_ms'][-1]:.1f} ms, {server.rss_mib():.0f} MiB", flush=True)
    rates: dict[str, list[list[float]]] = {"training": [], "sampling": []}  # tokens/s, by round, by count
    for warm_up in (train, sample):
        warm_up(tenants)
    for _ in range(rounds):
        rates["training"].append([train(tenants[:count]) for count in counts])
        rates["sampling"].append([sample(tenants[:count]) for count in counts])
        print({name: [round(rate) for rate in found[-1]] for name, found in rates.items()}, flush=True)
    medians = {
        name: [statistics.median(column) for column in zip(*found, strict=True)]
        for name, found in rates.items()
    }
    sides = [beside(tenants[0], attempt) for attempt in range(rounds + 1)][1:]
    return {
        "counts": list(counts),
        **growth,
        **medians,
        "short_s": statistics.median(short for short, _ in sides),
        "long_s": statistics.median(long for _, long in sides),
    }


def new_tenant(url: str, model: str, number: int) -> Tenant:
    client = Client(url, model, VOCABULARY, seed=number)
    client.deadline = time.monotonic() + SECONDS
    trainer = client.new_trainer()
    client.train(trainer, [client.datum(ROW_TOKENS)])
    return Tenant(client, trainer, client.sampler_of(trainer))


def latency_ms(tenants: Sequence[Tenant]) -> float:
    """Of a forward pass over one token, for tenants in turn who find the server idle."""
    seconds = []
    for place in range(16):
        tenant = tenants[place % len(tenants)]
        one = [tenant.client.datum(1)]
        call = lambda who=tenant, data=one: who.client.done(who.trainer.forward(data, "cross_entropy"))  # noqa: E731
        seconds.append(timed(call)[0])
    return 1000 * statistics.median(seconds)


def train(tenants: Sequence[Tenant]) -> float:
    """Tokens per second of all of them, who send all of their steps at once."""
    data = [[tenant.client.datum(ROW_TOKENS) for _ in range(ROWS)] for tenant in tenants]
    began = time.perf_counter()
    futures = [
        (tenant.client, future)
        for _ in range(STEPS // len(tenants))
        for tenant, rows in zip(tenants, data, strict=True)
        for future in train_soon(tenant.trainer, rows)
    ]
    for client, future in futures:
        client.deadline = time.monotonic() + SECONDS
        client.done(future)
    return STEPS * ROWS * ROW_TOKENS / (time.perf_counter() - began)


def sample(tenants: Sequence[Tenant]) -> float:
    """Tokens per second of all of them, each from weights of its own, in the bank if it has room."""
    for tenant in tenants:
        client = tenant.client
        client.deadline = time.monotonic() + SECONDS
        client.done(sample_soon(tenant.sampler, [client.text(32)], [1], 1)[0])
    began = time.perf_counter()
    each = PROMPTS // len(tenants)
    futures = []
    for tenant in tenants:
        prompts = [tenant.client.text(32) for _ in range(each)]
        found = sample_soon(tenant.sampler, prompts, [ANSWER] * each, COPIES)
        futures += [(tenant.client, future) for future in found]
    tokens = 0
    for client, future in futures:
        client.deadline = time.monotonic() + SECONDS
        tokens += sum(len(sequence.tokens) for sequence in client.done(future).sequences)
    return tokens / (time.perf_counter() - began)


def beside(tenant: Tenant, seed: int) -> tuple[float, float]:
    """Seconds of a short sample that is sent when a long one is, and of the long one."""
    client = tenant.client
    params = [
        tinker.types.SamplingParams(max_tokens=limit, temperature=1.0, seed=seed, stop=[])
        for limit in (LONG, SHORT)
    ]
    prompts = [tinker.types.ModelInput.from_ints(client.text(32)) for _ in params]
    began = time.perf_counter()
    long, short = [
        tenant.sampler.sample(prompt, num_samples=1, sampling_params=each)
        for prompt, each in zip(prompts, params, strict=True)
    ]
    client.deadline = time.monotonic() + SECONDS
    client.done(short)
    short_seconds = time.perf_counter() - began
    drawn = len(client.done(long).sequences[0].tokens)
    if drawn != LONG:
        raise RuntimeError(f"the long sample has {drawn} tokens, not {LONG}")
    return short_seconds, time.perf_counter() - began


def verdicts(report: dict[str, Any]) -> list[str]:
    """One line per bound."""
    place = {count: number for number, count in enumerate(report["counts"])}
    lines = []
    if {1, 8} <= place.keys():
        for name, least in (("training", 0.95), ("sampling", 0.9)):
            ratio = report[name][place[8]] / report[name][place[1]]
            lines.append(f"{name}, 8 tenants / 1 tenant: {ratio:.2f} (must: at least {least})")
    share = report["short_s"] / report["long_s"]
    lines.append(
        f"a sample of {SHORT} tokens beside one of {LONG}: {report['short_s']:.2f} s and "
        f"{report['long_s']:.2f} s, {share:.3f} of it (must: at most 0.1)"
    )
    return lines


HEADER = ("tenants", "1-token forward, ms", "memory, MiB", "training, tokens/s", "sampling, tokens/s")


def cells(report: dict[str, Any]) -> list[list[str]]:
    columns = [report[name] for name in ("counts", "latency_ms", "memory_mib", "training", "sampling")]
    return [[tables.number(value) for value in line] for line in zip(*columns, strict=True)]


def text(report: dict[str, Any]) -> str:
    return "\n".join([tables.text(HEADER, cells(report)), *verdicts(report)])


def markdown(report: dict[str, Any]) -> str:
    bullets = [f"- {line}" for line in verdicts(report)]
    load = f"The load of the machine was {report['load']} at the end."
    picture = "![Latency, memory and throughput by the number of tenants](performance_tenants.svg)"
    return "\n".join([tables.markdown(HEADER, cells(report)), "", *bullets, "", load, "", picture])


def chart(report: dict[str, Any]) -> str:
    rates = {name: report[name] for name in ("training", "sampling")}
    panels = [
        charts.Panel("1-token forward, ms", {"": report["latency_ms"]}),
        charts.Panel("memory, MiB", {"": report["memory_mib"]}),
        charts.Panel("all tenants together, tokens/s", rates),
    ]
    return charts.svg(panels, "tenants", report["counts"])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="up to 8 tenants, one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--settle-seconds", type=float, default=400.0)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "bench-tenants", help="is emptied")
    parser.add_argument("--our-cache", type=Path, help="programs that an earlier run has compiled")
    parser.add_argument("--publish", action="store_true", help="put the figures into docs/")
    arguments = parser.parse_args()
    arguments.counts = COUNTS[:4] if arguments.quick else COUNTS
    arguments.rounds = 1 if arguments.quick else arguments.rounds
    return arguments


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # the SDK's threads would wait for more
