"""Measures what the coordinator costs, without a model: python -m tools.bench.coordinator [--help]

Real server processes on SQLite and PostgreSQL, with a worker that answers every command at once with zeros,
and real HTTP over loopback. The load comes from the same cores, so beside times on the clock CPU seconds of
the coordinator's process are told, which are the firmer figure.

latency: one client, one request after the other; "wake-up" is from the request's arrival in the queue to
the sending of its command, with the request made durable in between. throughput: 32 tenants with 4 requests
each under way. burst: 512 samples, 208 bodies of 3.3 MB and the heartbeats of 32 clients at once. tenants:
the throughput with 1 to 32 tenants. stored: with up to 1,000,000 finished requests in the log.
"""

import argparse
import asyncio
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from tests.support.databases import run_postgres
from tools.bench import coordinator_burst, stored_requests
from tools.bench.coordinator_load import forward_body, open_tenant, streams, timed
from tools.bench.loopback_client import connect
from tools.bench.served import Served, serving

SCENARIOS = ("latency", "throughput", "burst", "tenants", "stored")
DATABASES = ("sqlite", "postgresql")
Figures = dict[str, float]


@contextmanager
def database(name: str) -> Iterator[str | None]:
    """Yield a URL, or None for SQLite in the data directory. Commits are durable in both."""
    if name == "sqlite":
        yield None
        return
    with run_postgres() as server:
        server.psql("ALTER SYSTEM SET fsync = on; SELECT pg_reload_conf();")
        yield server.get_uri()


def spread(milliseconds: Sequence[float]) -> Figures:
    median, late = np.percentile(milliseconds, [50, 95])
    return {"median ms": round(float(median), 2), "p95 ms": round(float(late), 2)}


async def latency(server: Served, directory: Path, url: str | None, requests: int = 200) -> Figures:
    """Send requests one at a time; the first ones do not count."""
    tenant = await open_tenant(server.url)
    await streams([tenant], 1, 50, "forward")
    cpu = server.cpu()
    round_trips = await streams([tenant], 1, requests, "forward")
    cpu = server.cpu() - cpu
    waking = await stored_requests.wake_ups(directory, url, requests)
    return {
        **{f"forward {name}": value for name, value in spread(round_trips).items()},
        **{f"wake-up {name}": value for name, value in spread(waking).items()},
        "cpu ms/future": round(1e3 * cpu / requests, 2),
    }


async def throughput(
    server: Served, directory: Path, url: str | None, kind: str = "forward", tenants: int = 32, each: int = 4
) -> Figures:
    everybody = [await open_tenant(server.url) for _ in range(tenants)]
    await streams(everybody, each, 500, kind)
    requests, loop = 4000, asyncio.get_running_loop()
    cpu, began = server.cpu(), loop.time()
    milliseconds = await streams(everybody, each, requests, kind)
    seconds, cpu = loop.time() - began, server.cpu() - cpu
    waking = await stored_requests.wake_ups(directory, url, requests)
    return {
        "futures/s": round(requests / seconds, 1),
        **spread(milliseconds),
        **{f"wake-up {name}": value for name, value in spread(waking).items()},
        "cpu ms/future": round(1e3 * cpu / requests, 3),
        "futures/cpu s": round(requests / cpu, 1),
        "memory MB": round(server.peak_memory() / 1e6),
    }


async def stored(server: Served) -> Figures:
    """Measure what a long log costs."""
    tenant = await open_tenant(server.url)
    connection, body = await connect(server.url), forward_body(tenant, 1)
    await streams([tenant], 1, 50, "forward")
    cpu = server.cpu()
    round_trips = [await timed(tenant.forward(connection, body)) for _ in range(200)]
    cpu = server.cpu() - cpu
    connection.close()
    return {
        "start s": round(server.start_seconds, 2),
        **spread(round_trips),
        "cpu ms/future": round(1e3 * cpu / 200, 2),
        "memory MB": round(server.memory() / 1e6),
    }


def measure(scenario: str, name: str, options: argparse.Namespace) -> Iterator[tuple[str, Figures]]:
    """Yield figures with their labels, one server after the other."""
    sizes = [size for size in (1_000, 10_000, 100_000, 1_000_000) if size <= options.stored]
    for size in sizes if scenario == "stored" else [0]:
        with database(name) as url, tempfile.TemporaryDirectory() as folder:
            directory = Path(folder)
            if size:
                asyncio.run(stored_requests.fill(directory / "data", url, size))
            with serving(directory, **({"database_url": url} if url else {})) as server:
                data = directory / "data"
                match scenario:
                    case "latency":
                        yield "one client", asyncio.run(latency(server, data, url))
                    case "throughput":
                        for kind in ("forward", "sample"):
                            figures = asyncio.run(throughput(server, data, url, kind))
                            yield f"32 tenants, {kind}", figures
                    case "burst":
                        yield "all at once", asyncio.run(coordinator_burst.burst(server, options.bodies))
                    case "tenants":
                        for count in (1, 2, 4, 8, 16, 32):
                            figures = asyncio.run(
                                throughput(server, data, url, "forward", count, 64 // count)
                            )
                            yield f"{count} tenants", figures
                    case _:
                        yield f"{size:,} stored", asyncio.run(stored(server))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scenarios", nargs="*", help=f"of {', '.join(SCENARIOS)}; all without any")
    parser.add_argument("--database", choices=DATABASES, action="append", help="both without any")
    parser.add_argument("--stored", type=int, default=1_000_000, help="the most stored requests")
    parser.add_argument("--bodies", type=int, default=208, help="of 3.3 MB, in the burst")
    parser.add_argument("--json", type=Path, help="a file for all figures")
    options = parser.parse_args()
    found = []
    for scenario in options.scenarios or SCENARIOS:
        for name in options.database or DATABASES:
            for label, figures in measure(scenario, name, options):
                told = ", ".join(f"{what} {value:,}" for what, value in figures.items())
                print(f"{scenario:10} {name:10} {label:20} {told}", flush=True)
                found.append({"scenario": scenario, "database": name, "case": label, **figures})
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
