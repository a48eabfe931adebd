"""Compares our server with the peer, in turn on the same machine: make bench ARGS="--quick"

Prints medians, their ratio, and whether it is what it should be. Everything that was measured is in --out.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tools.bench import figures, models, tables

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "performance_measured.md"
PEER_PYTHON = ROOT / ".venv-peer" / "bin" / "python"
VERSIONS = (
    "import platform, importlib.metadata as m, sys; "
    "print('Python', platform.python_version() + ',', *[f'{n} {m.version(n)}' for n in sys.argv[1:]])"
)


def main() -> None:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    out: Path = arguments.out.absolute()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    report: dict[str, Any] = {"machine": machine(), "command": sys.argv[1:], "models": {}}
    print(report["machine"], flush=True)
    parts = []
    for model in arguments.models:
        turns = take_turns(arguments, out, model)
        report["models"][model] = turns
        (out / "result.json").write_text(json.dumps(report, indent=1) + "\n")
        found = figures.rows(turns["ours"], turns["peer"], has_bounds=model == "tiny" and not arguments.quick)
        lines = [tables.cells(row) for row in found]
        print(f"\n{model}\n{tables.text(tables.HEADER, lines)}\n", flush=True)
        notes = [f"- {row.figure.name}: {row.error}" for row in found if row.error]
        parts.append("\n".join([f"Model {model}:", "", tables.markdown(tables.HEADER, lines), *notes]))
    conditions = describe(arguments, report["machine"])
    content = "\n\n".join([conditions, *parts])
    (out / "table.md").write_text(content + "\n")
    print(f"the table is in {out / 'table.md'}, all results in {out / 'result.json'}")
    if arguments.publish:
        turns = [turn for sides in report["models"].values() for side in sides.values() for turn in side]
        if broken := [turn["turn"]["error"] for turn in turns if "turn" in turn]:
            sys.exit(f"nothing was published: a turn {broken[0]}")
        tables.publish(PAGE, "make bench", content)


def take_turns(arguments: argparse.Namespace, out: Path, model: str) -> dict[str, list[figures.Turn]]:
    """Run ours, peer, ours, peer, each from the same state, and return the results of each turn."""
    path = models.write(model, out / "models")
    turns: dict[str, list[figures.Turn]] = {side: [] for side in ("ours", "peer")}
    for number in range(1, arguments.rounds + 1):
        for side in arguments.sides:
            began = time.monotonic()
            print(f"{model}, round {number}, {side}:", flush=True)
            turns[side].append(take_turn(arguments, side, path, out / f"{model}-{number}-{side}"))
            print(f"  {side}: {time.monotonic() - began:.0f} s", flush=True)
    return turns


def take_turn(arguments: argparse.Namespace, side: str, model: Path, folder: Path) -> figures.Turn:
    folder.mkdir()
    result = folder / "result.json"
    command = [str(arguments.peer_python), "-m", "tools.bench.turn", "--side", side, "--model", str(model)]
    command += ["--load", model.name, "--folder", str(folder), "--out", str(result)]
    command += ["--server-python", sys.executable, "--sections", *arguments.sections]
    command += ["--settle-seconds", str(arguments.settle_seconds)]
    command += ["--section-deadline", str(arguments.section_deadline)]
    command += ["--quick"] if arguments.quick else []
    command += ["--first-minute"] if side == "ours" and not arguments.only_warm else []
    command += (
        ["--cache", str(arguments.our_cache.absolute())] if side == "ours" and arguments.our_cache else []
    )
    with subprocess.Popen(command, cwd=ROOT) as turn:
        try:
            code = turn.wait()
        except (KeyboardInterrupt, SystemExit):
            turn.terminate()  # it ends its server
            raise
    found = json.loads(result.read_text())["results"] if result.exists() else {}
    if code:
        found["turn"] = {"error": f"ended with code {code}"}
    return found


def machine() -> dict[str, Any]:
    """Describe the machine; the load is that before the run."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": names[0].partition(": ")[2] if names else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "load": round(os.getloadavg()[0], 1),
        "ours": _versions(Path(sys.executable), "jax"),
        "date": time.strftime("%Y-%m-%d"),
    }


def describe(arguments: argparse.Namespace, about: dict[str, Any]) -> str:
    """Describe the conditions under which the table was made."""
    options = [
        option
        for option in ("models", "sections", "rounds", "quick", "only_warm")
        if option in arguments.given
    ]
    text = " ".join(
        f"--{option.replace('_', '-')} {_argument(getattr(arguments, option))}".strip() for option in options
    )
    command = f'make bench ARGS="{text}"' if text else "make bench"
    packages = ("jax", "skyrl", "tinker") if "peer" in arguments.sides else ("tinker",)
    peer = _versions(arguments.peer_python, *packages)
    cores = f"{about['cores']} cores ({about['cpu']}), {about['memory_gib']} GiB"
    return " ".join(
        [
            f"`{command}` on {about['date']}: {cores}; the load was {about['load']} when it began.",
            f"Ours: {about['ours']}. Peer, and the SDK of both: {peer}.",
            f"Rounds: {arguments.rounds}{', of few repetitions of little work' if arguments.quick else ''}.",
        ]
    )


def _argument(value: object) -> str:
    if isinstance(value, bool):
        return ""
    return " ".join(value) if isinstance(value, list) else str(value)


def _versions(python: Path, *packages: str) -> str:
    done = subprocess.run(
        [str(python), "-c", VERSIONS, *packages], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=tuple(models.SPECS), default=["tiny"])
    parser.add_argument("--sides", nargs="+", choices=("ours", "peer"), default=["ours", "peer"])
    parser.add_argument("--sections", nargs="+", choices=figures.SECTIONS, default=figures.SECTIONS)
    parser.add_argument("--rounds", type=int, default=1, help="turns of each")
    parser.add_argument("--quick", action="store_true", help="few repetitions of little work: does it run?")
    parser.add_argument(
        "--settle-seconds",
        type=float,
        default=400.0,
        help="to wait at most for a server to be idle after its start",
    )
    parser.add_argument("--section-deadline", type=float, default=240.0, help="seconds; a section fails then")
    parser.add_argument("--only-warm", action="store_true", help="leave out the first minute")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "bench", help="is emptied")
    parser.add_argument(
        "--our-cache",
        type=Path,
        help="programs that ours has compiled in an earlier run; its cold start is not measured then",
    )
    parser.add_argument(
        "--publish", action="store_true", help="put the table into docs/performance_measured.md"
    )
    parser.add_argument("--peer-python", type=Path, default=PEER_PYTHON)
    arguments = parser.parse_args()
    given = {name for name, value in vars(arguments).items() if value != parser.get_default(name)}
    arguments.given = given
    return arguments


if __name__ == "__main__":
    main()
