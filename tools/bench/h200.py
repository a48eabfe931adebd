"""The first half hour on a GPU: checks what could be wrong there, then measures how fast the steps are.

    python -m tools.bench.h200                                  all parts, half an hour on one H200
    python -m tools.bench.h200 --parts copies,kernels           some of them
    python -m tools.bench.h200 --dry-run                        the same code with tiny sizes, on any machine

Qwen3-4B and -8B shapes with random weights. Each part runs in a process of its own with the environment that
a worker of several GPUs would have (all flags that XLA knows, the attention that passes its self-test); a
crash costs that part only. Figures are printed as soon as they are known, and kept, with those of earlier
runs, in --out and as Markdown beside it; those of a whole run are written into docs/performance_measured.md.
The exit code is 1 if a check has failed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from tools.bench.meter import Meter, markdown
from tools.bench.roofline import Ceilings

# The parts of h200_parts.py with their shares of the time, what matters most first.
PARTS = {
    "copies": 1,
    "kernels": 3,
    "ceilings": 1,
    "train": 8,
    "decode": 4,
    "speculation": 2,
    "chunks": 2,
    "prefill": 3,
    "attention": 3,
    "paged": 2,
    "experts": 2,
    "images": 1,
    "draws": 1,
    "swap": 1,
}
CHECKS = ("copies", "kernels")  # these run beside each other, as nothing in them is timed
SHARDS = 4  # processes among which the kernels are divided: most of their time is one core's, for compiling
SECONDS = 1600.0
GRACE_SECONDS = 60  # for the figure that was begun when a part's time was over
PAGE = Path("docs/performance_measured.md")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="some of " + ",".join(PARTS))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all of them")
    parser.add_argument("--out", type=Path, default=Path("build/h200.json"))
    parser.add_argument("--page", type=Path, help=f"to write tables into; default: {PAGE} after a whole run")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on CPUs; no page is written")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        measure(options.child, options.out, json.loads(options.settings))
        return 0
    parts = options.parts.split(",")
    unknown = set(parts) - PARTS.keys()
    if unknown:
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    report = run(options, parts)
    page = options.page or (PAGE if set(parts) == PARTS.keys() else None)
    if page is not None and not options.dry_run:
        from tools.bench.h200_page import put

        put(page, report)
        print(f"written into {page}")
    failed = failures(report, parts)
    print("\n".join(failed) or "all checks passed")
    return 1 if failed else 0


def run(options: argparse.Namespace, parts: list[str]) -> dict[str, Any]:
    """Run each part in its own process; the report grows part by part."""
    out, deadline = options.out, time.monotonic() + options.seconds
    report: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"parts": {}}
    if options.dry_run:
        os.environ["JAX_PLATFORMS"] = "cpu"
    if "attention" not in report:
        report |= self_test(options.dry_run)
    os.environ["XLA_FLAGS"] = " ".join(report["flags"])
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    checks, parts = [part for part in parts if part in CHECKS], [part for part in parts if part not in CHECKS]
    groups = [checks, *([part] for part in parts)] if checks else [[part] for part in parts]
    for number, group in enumerate(groups):
        shares = [sum(PARTS[part] for part in each) for each in groups[number:]]
        left = (deadline - time.monotonic()) * shares[0] / sum(shares)
        print(f"{', '.join(group)} ({left:.0f} s)", flush=True)
        report["parts"] |= in_processes(group, options, report, left)
        if group == ["ceilings"] and not options.dry_run:
            report["ceilings"] = measured_ceilings(report["parts"]["ceilings"])
        report["machine"] = machine(report)
        report["date"] = datetime.now(UTC).date().isoformat()
        out.write_text(json.dumps(report, indent=1))
        out.with_suffix(".md").write_text(markdown(report["parts"]))
    return report


def machine(report: dict[str, Any]) -> str:
    """Return the name of the device that the ceilings were measured on."""
    rows = report["parts"].get("ceilings", [])
    return next((row["name"] for row in rows if "bytes_limit" in row), report.get("machine", "a device"))


def failures(report: dict[str, Any], parts: list[str]) -> list[str]:
    """Return what the checks among these parts have found wrong."""
    rows = [row for part in parts if part in CHECKS for row in report["parts"].get(part, [])]
    return [f"{row['name']}: {row['problem']}" for row in rows if "problem" in row]


def self_test(is_dry: bool) -> dict[str, Any]:
    """Return the flags and the attention that a worker here would use, and why not others."""
    from spmd_tx.worker import xla_flags
    from spmd_tx.worker.kernel_choices import try_out
    from spmd_tx.worker.self_tests.attention import AttentionSizes
    from spmd_tx.worker.self_tests.process import run_self_test

    heads, kv_heads, width = (4, 2, 16) if is_dry else (32, 8, 128)
    names = ["reference"] if is_dry else ["triton", "cudnn_masked", "reference"]
    sizes = AttentionSizes(names, heads, kv_heads, width)
    start = time.monotonic()
    wanted = [*xla_flags.REPRODUCIBLE, *xla_flags.COMPUTED_ONCE, *xla_flags.OVERLAPPED]
    flags, verdicts = try_out(wanted, sizes, partial(run_self_test, ""))
    found = {verdict.implementation: verdict.problem for verdict in verdicts}
    print(f"self-test: {found}, flags {flags}, {time.monotonic() - start:.0f} s", flush=True)
    chosen = next((name for name, problem in found.items() if problem is None), "reference")
    return {"attention": chosen, "self_test": found, "flags": flags}


def in_processes(
    parts: list[str], options: argparse.Namespace, report: dict[str, Any], seconds: float
) -> dict[str, list[Any]]:
    """Run parts beside each other, those of many checks in several processes; return the rows of each."""
    shards = {part: SHARDS if part == "kernels" and not options.dry_run else 1 for part in parts}
    work = [(part, shard) for part in parts for shard in range(shards[part])]
    share = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if len(work) > 1 else {}

    def run_one(part: str, shard: int) -> list[Any]:
        settings = {
            "seconds": seconds,
            "dry": options.dry_run,
            "shard": [shard, shards[part]],
            "attention": report["attention"],
            "ceilings": report.get("ceilings", msgspec.to_builtins(Ceilings())),
        }
        return in_process(part, options.out.with_suffix(f".{part}.{shard}.jsonl"), settings, share)

    with ThreadPoolExecutor(len(work)) as pool:
        found = list(pool.map(lambda each: run_one(*each), work))
    return {
        part: [row for (owner, _), rows in zip(work, found, strict=True) if owner == part for row in rows]
        for part in parts
    }


def in_process(part: str, rows: Path, settings: dict[str, Any], environment: dict[str, str]) -> list[Any]:
    """Run a part in a child process; return the rows that it left, however it ended."""
    rows.write_text("")
    command = [sys.executable, "-m", "tools.bench.h200", "--child", part, "--out", str(rows)]
    try:
        ended = subprocess.run(
            [*command, "--settings", json.dumps(settings)],
            timeout=max(1, settings["seconds"]) + GRACE_SECONDS,
            env=os.environ | environment,
        )
        end = f"the process ended with {ended.returncode}" if ended.returncode else None
    except subprocess.TimeoutExpired:
        end = "the process was stopped, past its time"
    found = [json.loads(line) for line in rows.read_text().splitlines() if line.endswith("}")]
    rows.unlink()
    return [*found, *([{"name": part, "problem": end}] if end else [])]


def measure(part: str, rows: Path, settings: dict[str, Any]) -> None:
    """Run one part in this process."""
    import jax

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    from tools.bench import h200_parts

    assert h200_parts.PARTS.keys() == PARTS.keys()
    ceilings, shard = Ceilings(**settings["ceilings"]), tuple(settings["shard"])
    scale = h200_parts.Scale(settings["dry"], ceilings, settings["attention"], shard)
    meter = Meter(rows, time.monotonic() + settings["seconds"])
    with meter.guard(part):
        h200_parts.PARTS[part](meter, scale)


def measured_ceilings(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return this machine's measured rates, where they differ from the known ones."""
    found = {row["name"]: row["work"] / row["least_milliseconds"] for row in rows if "work" in row}
    usual = Ceilings()
    return {
        "teraflops": found.get("product of two matrices in bfloat16", usual.teraflops * 1e9) / 1e9,
        "gigabytes": found.get("copy, read and written", usual.gigabytes * 1e6) / 1e6,
    }


if __name__ == "__main__":
    sys.exit(main())
