"""Tables, lines and curves of training runs, as wide as the terminal. Asks no server."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from spmd_tx.cli.consoles import UNBOUNDED
from spmd_tx.demo.display import draw_curve
from spmd_tx.errors import StartError

FIRST = ("reward", "loss:sum", "entropy:mean", "kl:mean", "unclipped_grad_l2:mean")  # of the columns
MOST_COLUMNS, LISTED = 6, 2
LAST_STEPS = 20
LABELS = ("name", "group")  # that people give to runs
NAMES = ("run", "checkpoint", *LABELS, "owner", "metric")  # columns of text
CURVE_HEIGHT, CURVE_MARGIN, WIDEST_CURVE = 8, 16, 100
LINES_BESIDE = CURVE_HEIGHT + 8  # of a page, besides the rows of steps
BY_CLIENT = "steps as the client counts them:"
OF_CLIENT = ("silent", "left")  # states of a run's client

Metrics = Mapping[str, float | None]
Points = list[dict[str, Any]]  # as the server tells them
TableRows = Sequence[Sequence[str]]


def of_runs(runs: Sequence[dict[str, Any]], console: Console) -> Table:
    """Make a table of runs, with as many metrics as fit."""
    names = _columns(run["last"] for run in runs)[:LISTED]
    states = ["state"] if any(map(state, runs)) else []
    labels = [label for label in LABELS if any(run.get(label) for run in runs)]
    rows = [
        [
            readable(run["id"]),
            *(readable(run.get(label) or "") for label in labels),
            readable(run["owner"]),
            datetime.fromtimestamp(run["created_at"]).strftime("%m-%d %H:%M"),
            *(state(run) for _ in states),
            str(run["steps"]),
            *_values(run["last"], names),
        ]
        for run in runs
    ]
    return table_that_fits(
        ["run", *labels, "owner", "created", *states, "steps", *map(readable, names)], rows, console
    )


def state(run: Mapping[str, Any]) -> str:
    """Say in a word how a run is; "" where an older server does not tell it."""
    return "archived" if run.get("archived_at") is not None else run.get("health", {}).get("state", "")


def condition(run: Mapping[str, Any]) -> str:
    """Say in a sentence how a run is; "" where an older server does not tell it."""
    health = run.get("health")
    if health is None:
        return ""
    word = f"client {health['state']}" if health["state"] in OF_CLIENT else health["state"]
    return readable(word if health["reason"] is None else f"{word}: {health['reason']}")


def of_run(run: str, points: Points, logged: Points, metric: str | None, console: Console) -> Group:
    """Show the last steps of a run, and those that its client counts by itself, each with a curve.

    Raises StartError where none has the metric.
    """
    if not logged:
        return of_steps(run, points, metric, console)
    known = [any(metric in each["metrics"] for each in steps) for steps in (points, logged)]
    shown = [of_steps(run, points, metric, console)] if metric is None or known[0] or not known[1] else []
    if metric is None or known[1]:
        shown += [Text(), Text(BY_CLIENT), of_steps(run, logged, metric, console)]
    return Group(*shown)


def of_steps(run: str, points: Points, metric: str | None, console: Console, most: int = LAST_STEPS) -> Group:
    """Show the last steps of a run, and a curve of all. Raises StartError where none has the metric."""
    if not points:
        return Group(Text(f"{readable(run)} has taken no step yet"))
    if metric is not None and not any(metric in point["metrics"] for point in points):
        names = dict.fromkeys(name for point in points[-LAST_STEPS:] for name in point["metrics"])
        known = ", ".join(readable(name) for name in sorted(names))
        raise StartError(f"{run} has no metric {metric!r}; it has {known}")
    shown = points[-most:]
    names = _columns(point["metrics"] for point in shown)
    rows = [[str(point["step"]), _clock(point), *_values(point["metrics"], names)] for point in shown]
    table = table_that_fits(["step", "at", *map(readable, names)], rows, console)
    drawn = metric or names[0]
    having = [point for point in points if point["metrics"].get(drawn) is not None]
    if not having:
        return Group(table, Text(), Text(f"{readable(drawn)} has no finite value"))
    curve = draw_curve(
        [point["metrics"][drawn] for point in having],
        height=CURVE_HEIGHT,
        name=readable(drawn),
        width=max(1, min(WIDEST_CURVE, console.width - CURVE_MARGIN)),
        steps=(having[0]["step"], having[-1]["step"]),
    )
    return Group(table, Text(), curve)


def line(point: dict[str, Any]) -> str:
    """Describe a step in a line."""
    names = _columns([point["metrics"]])
    values = zip(map(readable, names), _values(point["metrics"], names), strict=True)
    return "  ".join([f"step {point['step']}", _clock(point), *(f"{name} {value}" for name, value in values)])


def line_of_client(point: dict[str, Any]) -> str:
    """Describe in a line what a client has sent of a step that it counts by itself."""
    return f"client's {line(point)}"


def readable(text: str) -> str:
    """Replace what could steer a terminal: names come from clients."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def _columns(metrics: Iterable[Metrics]) -> list[str]:
    """Return the metrics to show: those that are looked at most, then others."""
    present = dict.fromkeys(name for each in metrics for name in each)
    first = [name for name in FIRST if name in present]
    return [*first, *(name for name in present if name not in first)][:MOST_COLUMNS] or ["loss:sum"]


def _values(metrics: Metrics, names: Sequence[str]) -> Iterator[str]:
    for name in names:
        value = metrics.get(name)
        yield "-" if value is None else f"{value:.4g}"


def _clock(point: dict[str, Any]) -> str:
    return datetime.fromtimestamp(point["at"]).strftime("%H:%M:%S")


def table_that_fits(headings: Sequence[str], rows: TableRows, console: Console) -> Table:
    """Make a table without the last columns that do not fit, but with the first one in any case."""
    unbounded = console.options.update(max_width=UNBOUNDED)
    for count in range(len(headings), 1, -1):
        table = _table(headings[:count], rows)
        if console.measure(table, options=unbounded).maximum <= console.width:
            return table
    return _table(headings[:1], rows)


def _table(headings: Sequence[str], rows: TableRows) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for heading in headings:
        is_name = heading in NAMES
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=not is_name)
    for row in rows:
        table.add_row(*row[: len(headings)])
    return table
