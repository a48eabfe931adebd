"""Figures as tables: for a terminal, and in Markdown for the documentation."""

import re
from collections.abc import Sequence
from pathlib import Path

from tools.bench.figures import Row

HEADER = (
    "figure",
    "first minute",
    "warm",
    "peer",
    "first / warm (speed)",
    "first minute is",
    "warm / peer",
    "must",
    "aim",
    "verdict",
    "per CPU second",
)


def cells(row: Row) -> tuple[str, ...]:
    figure = row.figure
    sign = "≤" if figure.is_lower_better else "≥"
    return (
        f"{figure.name} ({'lower is better, ' if figure.is_lower_better else ''}{figure.unit})",
        number(row.first) if figure.is_of_first_minute else "",
        number(row.ours),
        number(row.peer),
        number(row.first_speed) if figure.is_of_first_minute else "",
        row.first_verdict(),
        number(row.ratio),
        f"{sign} {figure.must:g}" if figure.must is not None else "",
        f"{sign} {figure.aim:g}" if figure.aim is not None else "",
        row.verdict(),
        number(row.cpu_ratio) if figure.is_cpu_bound else "",
    )


def number(value: float | None) -> str:
    """Three digits, and all of those before the point."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def text(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[column]) for line in (header, *rows)) for column in range(len(header))]
    lines = [
        "  ".join(
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in (header, *rows)
    ]
    return "\n".join(line.rstrip() for line in lines)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def publish(page: Path, name: str, content: str) -> None:
    """Put generated text between the page's marks of that name; ValueError if it has none."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    before = page.read_text()
    pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
    if not pattern.search(before):
        raise ValueError(f"{page} has no part between {begin} and {end}")
    page.write_text(pattern.sub(lambda _: f"{begin}\n{content.strip()}\n{end}", before))
