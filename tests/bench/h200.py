"""Measures how close the engine's steps come to what one GPU can do: Qwen3-4B and -8B shapes, random weights.

    python -m tests.bench.h200 --parts ceilings,attention,draws,swap --seconds 500
    python -m tests.bench.h200 --parts train --seconds 560
    python -m tests.bench.h200 --parts decode,paged,prefill --seconds 560
    python -m tests.bench.h200 --smoke                all parts with tiny shapes, on any machine

Three commands for half an hour with an H200. Each part runs in a process of its own with the environment that
a worker would have (flags that XLA knows, the attention that passes its self-test); a crash costs that part
only. Figures are printed as soon as they are known, and kept, with those of earlier runs, in --out and as
Markdown beside it.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from tests.bench.meter import Meter, markdown
from tests.bench.roofline import Ceilings

PARTS = ("ceilings", "attention", "train", "decode", "paged", "prefill", "draws", "swap")  # of h200_parts.py
GRACE_SECONDS = 60  # for the figure that was begun when a part's time was over


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="some of " + ",".join(PARTS))
    parser.add_argument("--seconds", type=float, default=500.0, help="for all of them")
    parser.add_argument("--out", type=Path, default=Path("build/h200.json"))
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        measure(options.child, options.out, json.loads(options.settings))
        return
    unknown = set(options.parts.split(",")) - set(PARTS)
    if unknown:
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    run(options)


def run(options: argparse.Namespace) -> None:
    """Run each part in its own process; the report grows part by part."""
    out, deadline = options.out, time.monotonic() + options.seconds
    report: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"parts": {}}
    if options.smoke:
        os.environ["JAX_PLATFORMS"] = "cpu"
    if "attention" not in report:
        report |= self_test(options.smoke)
    os.environ["XLA_FLAGS"] = " ".join(report["flags"])
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    parts = options.parts.split(",")
    for number, part in enumerate(parts):
        left = (deadline - time.monotonic()) / (len(parts) - number)
        print(f"{part} ({left:.0f} s)", flush=True)
        report["parts"][part] = in_process(part, options, report, left)
        if part == "ceilings" and not options.smoke:
            report["ceilings"] = measured_ceilings(report["parts"][part])
        out.write_text(json.dumps(report, indent=1))
        out.with_suffix(".md").write_text(markdown(report["parts"]))


def self_test(is_smoke: bool) -> dict[str, Any]:
    """Return the flags and the attention that a worker here would use, and why not others."""
    from spmd_tx.worker import accelerator
    from spmd_tx.worker.self_test import Sizes

    heads, kv_heads, width = (4, 2, 16) if is_smoke else (32, 8, 128)
    names = ["reference"] if is_smoke else ["cudnn", "cudnn_masked", "reference"]
    sizes = Sizes(names, heads, kv_heads, width)
    start = time.monotonic()
    run_once = accelerator.partial(accelerator.run_self_test, "")
    flags, verdicts = accelerator.try_out([*accelerator.REPRODUCIBLE], sizes, run_once)
    found = {verdict.implementation: verdict.problem for verdict in verdicts}
    print(f"self-test: {found}, flags {flags}, {time.monotonic() - start:.0f} s", flush=True)
    chosen = next((name for name, problem in found.items() if problem is None), "reference")
    return {"attention": chosen, "self_test": found, "flags": flags}


def in_process(part: str, options: argparse.Namespace, report: dict[str, Any], seconds: float) -> list[Any]:
    """Run a part in a child process; return the rows that it left, however it ended."""
    rows = options.out.with_suffix(f".{part}.jsonl")
    rows.write_text("")
    settings = {
        "seconds": seconds,
        "smoke": options.smoke,
        "attention": report["attention"],
        "ceilings": report.get("ceilings", msgspec.to_builtins(Ceilings())),
    }
    command = [sys.executable, "-m", "tests.bench.h200", "--child", part, "--out", str(rows)]
    try:
        ended = subprocess.run(
            [*command, "--settings", json.dumps(settings)], timeout=max(1, seconds) + GRACE_SECONDS
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
    from tests.bench import h200_parts

    assert tuple(h200_parts.PARTS) == PARTS
    scale = h200_parts.Scale(settings["smoke"], Ceilings(**settings["ceilings"]), settings["attention"])
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
    main()
