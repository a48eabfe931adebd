"""Draws the figures of docs/performance_measured.md and docs/performance_calculated.md from their tables.

Usage: python -m tests.write_figures
"""

import re
from pathlib import Path

from tools.bench import charts

DOCS = Path(__file__).parents[1] / "docs"
COMMAND = "python -m tests.write_figures"
DEVICES = "8 x h100"
ROLES = ("train", "prefill", "decode")


def figures() -> dict[str, str]:
    """The SVG of each figure, by its file's name."""
    drawn = {"performance_peer.svg": peer(table("performance_measured.md", "make bench"))}
    for role in ROLES:
        drawn[f"performance_{role}.svg"] = calculated(table("performance_calculated.md", "make aot"), role)
    return drawn


def table(page: str, mark: str) -> list[dict[str, str]]:
    """The rows of the first table behind a mark of a page, by the names of their columns."""
    written = (DOCS / page).read_text()
    (text,) = re.findall(rf"<!-- {mark} -->(.*?)<!-- end of {mark} -->", written, re.DOTALL)
    lines = re.findall(r"^\| (.*) \|$", text, re.MULTILINE)
    header, _, *rows = [[cell.strip() for cell in line.split(" | ")] for line in lines]
    return [dict(zip(header, row, strict=True)) for row in rows]


def peer(rows: list[dict[str, str]]) -> str:
    """How many times as fast (or as small) as the peer the server is, when all is compiled."""
    times = {}
    for row in rows:
        name, _, details = row["figure"].partition(" (")
        ratio = float(row["warm / peer"])
        times[name] = 1 / ratio if "lower is better" in details else ratio
    return charts.bars("How many times as fast as SkyRL's JAX backend, or as small", times, unit="x", mark=1)


def calculated(rows: list[dict[str, str]], role: str) -> str:
    """Tokens per second that each model would reach at most."""
    found = {
        f"{row['model']}, fsdp ep tp = {row['mesh (fsdp, ep, tp)']}": float(
            row["tokens/s at most"].replace(",", "")
        )
        for row in rows
        if row["devices"] == DEVICES and row["program, per data shard"].startswith(role)
    }
    return charts.bars(f"{role}: tokens/s of {DEVICES} together, calculated", found)


if __name__ == "__main__":
    for name, svg in figures().items():
        (DOCS / name).write_text(svg)
        print(f"wrote {DOCS / name}")
