"""Writes what h200.py has measured into a page of the documentation, between two marks."""

from pathlib import Path
from typing import Any

from tools.bench.meter import table

BEGIN, END = "<!-- h200: begin -->", "<!-- h200: end -->"
TITLES = {
    "copies": "Pages of a pool of more than 2^32 numbers",
    "kernels": "Kernels beside the reference",
    "ceilings": "The machine",
    "attention": "Attention of one layer",
    "train": "Training, with its parts",
    "decode": "Decode, with its parts",
    "speculation": "A decode that reads several tokens of each sequence, with its parts",
    "chunks": "A decode that reads a chunk of a prompt, with its parts",
    "paged": "Attention of decode, one layer",
    "prefill": "Prefill, with its parts",
    "experts": "Experts of one layer",
    "images": "One image through the vision tower",
    "draws": "Drawing tokens",
    "swap": "One adapter between its places",
}


def section(report: dict[str, Any]) -> str:
    """Return the text for the page: who measured, and a table for each part."""
    lines = [
        f"Measured on {report.get('machine', 'a device')} on {report.get('date', 'a day')} with "
        "`python -m tools.bench.h200`; milliseconds are medians, and predictions are those of "
        "`spmd-tx plan --compile` for the same programs.",
        "",
        *(f"* attention {name!r} is not used: {why}" for name, why in _refused(report)),
    ]
    for part, rows in report["parts"].items():
        lines += ["", f"**{TITLES.get(part, part)}**", "", *(_verdict(rows) or table(rows))]
    return "\n".join(lines).strip()


def _verdict(rows: list[dict[str, Any]]) -> list[str]:
    """Return one line for checks of which each is right; nothing for anything else."""
    is_right = all(row.get("verdict") == "right" or row.get("wrong_pages") == 0 for row in rows)
    return [f"{len(rows)} checks, all of them right."] if rows and is_right else []


def _refused(report: dict[str, Any]) -> list[tuple[str, str]]:
    return [(name, why) for name, why in report.get("self_test", {}).items() if why is not None]


def put(page: Path, report: dict[str, Any]) -> None:
    """Replace what stands between the marks. Raises ValueError if the page lacks them."""
    text = page.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{page} lacks the lines {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n\n{section(report)}\n\n{END}{after}")
