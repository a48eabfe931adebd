"""``spmd-tx runs`` shows training runs and their metrics, of a server that runs."""

import json
import time
from datetime import datetime
from typing import Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from spmd_tx.cli.server import LOCAL, ApiKey, Server, Url
from spmd_tx.demo.display import draw_curve
from spmd_tx.errors import StartError

FIRST = ("reward", "loss:sum", "entropy:mean", "kl:mean", "unclipped_grad_l2:mean")  # of the columns
MOST_COLUMNS, LISTED = 6, 2
LAST_STEPS = 20
EVERY_SECONDS = 2.0

Run = Annotated[str, typer.Argument(metavar="RUN", help="ID of the run, as in spmd-tx runs list.")]
Metric = Annotated[str | None, typer.Option(help="Metric to draw. Default: the reward, or else the loss.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]

runs = typer.Typer(
    name="runs",
    no_args_is_help=True,
    help="List training runs, and show their metrics, also while they train. See docs/sessions.md.",
)


@runs.command("list")
def list_runs(
    most: Annotated[int, typer.Option(min=1, max=1000, help="Maximum number of runs to show.")] = 20,
    as_json: Json = False,
    url: Url = LOCAL,
    api_key: ApiKey = "",
) -> None:
    """List training runs, the newest first, with the newest metrics."""
    server, found, cursor = Server(url, api_key), [], 0
    while cursor is not None and len(found) < most:
        page = server.ask(f"/console/api/runs?limit={min(most - len(found), 100)}&cursor={cursor}")
        found, cursor = found + page["runs"], page["next_cursor"]
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    columns = _columns(run["last"] for run in found)[:LISTED]
    table = _table("run", "owner", "created", "steps", *columns)
    for run in found:
        created = datetime.fromtimestamp(run["created_at"]).strftime("%Y-%m-%d %H:%M")
        values = (_number(run["last"].get(name)) for name in columns)
        table.add_row(run["id"], run["owner"], created, str(run["steps"]), *values)
    _console().print(table)


@runs.command()
def show(
    run: Run, metric: Metric = None, as_json: Json = False, url: Url = LOCAL, api_key: ApiKey = ""
) -> None:
    """Show the last steps of a run, and the curve of a metric."""
    points = _points(Server(url, api_key), run, -1)
    if as_json:
        typer.echo(json.dumps(points, indent=2))
    else:
        _console().print(_view(run, points, metric))


@runs.command()
def tail(run: Run, metric: Metric = None, url: Url = LOCAL, api_key: ApiKey = "") -> None:
    """Show a run while it trains, until Ctrl-C."""
    server = Server(url, api_key)
    points = _points(server, run, -1)
    with Live(_view(run, points, metric), console=_console(), auto_refresh=False) as live:
        while True:
            time.sleep(EVERY_SECONDS)
            again = points[-LAST_STEPS - 1]["seq"] if len(points) > LAST_STEPS else -1
            points = points[: max(0, len(points) - LAST_STEPS)] + _points(server, run, again)
            live.update(_view(run, points, metric), refresh=True)


def _points(server: Server, run: str, after: int | None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while after is not None:
        page = server.ask(f"training_runs/{quote(run, safe='')}/metrics?after={after}")
        found, after = found + page["points"], page["next_after"]
    return found


def _view(run: str, points: list[dict[str, Any]], metric: str | None) -> RenderableType:
    if not points:
        return Text(f"{run} has taken no step yet")
    shown = points[-LAST_STEPS:]
    columns = _columns(point["metrics"] for point in shown)
    if metric is not None and not any(metric in point["metrics"] for point in points):
        raise StartError(f"{run} has no metric {metric!r}; it has {', '.join(sorted(points[-1]['metrics']))}")
    table = _table("step", "at", *columns)
    for point in shown:
        at = datetime.fromtimestamp(point["at"]).strftime("%H:%M:%S")
        table.add_row(str(point["step"]), at, *(_number(point["metrics"].get(name)) for name in columns))
    name = metric or columns[0]
    values = [point["metrics"].get(name) for point in points]
    return Group(table, Text(), draw_curve([value for value in values if value is not None], name=name))


def _columns(metrics: Any) -> list[str]:
    """Return the metrics to show: those that are looked at most, then others."""
    present = dict.fromkeys(name for each in metrics for name in each)
    first = [name for name in FIRST if name in present]
    return [*first, *(name for name in present if name not in first)][:MOST_COLUMNS] or ["loss:sum"]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _table(*headings: str) -> Table:
    table = Table(box=None, padding=(0, 2))
    for heading in headings:
        is_name = heading in ("run", "owner")
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=heading == "run")
    return table


def _console() -> Console:
    return Console(emoji=False, markup=False)  # ids hold colons, and names of clients may hold anything
