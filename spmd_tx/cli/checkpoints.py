"""``spmd-tx checkpoints`` lists checkpoints with what was known of their runs, and marks the best one."""

import json
import math
from datetime import datetime
from functools import partial
from typing import Annotated, Any, Literal
from urllib.parse import quote, urlencode

import typer

from spmd_tx.cli import consoles
from spmd_tx.cli.options import Json, MostShown
from spmd_tx.cli.run_tables import readable, table_that_fits
from spmd_tx.cli.runs import whole_id
from spmd_tx.cli.server import LOCAL, ApiKeyOption, Server, UrlOption
from spmd_tx.coordinator.wire import checkpoint_paths
from spmd_tx.errors import InvalidRequest, StartError

PAGE = 100
HEADINGS = ("checkpoint", "best", "step", "metric", "value", "loss", "created")
Saved = dict[str, Any]  # a checkpoint with its step and metrics, as the server tells it
SortChoice = Literal["created", "value", "loss"]

checkpoints = typer.Typer(
    name="checkpoints",
    no_args_is_help=True,
    help="List checkpoints with the reward at each save, and mark the best. See docs/checkpoints.md.",
)


@checkpoints.command("list")
def list_checkpoints(
    run: Annotated[str, typer.Option(help="ID of a run, or the beginning of it. Default: all runs.")] = "",
    metric: Annotated[str, typer.Option(help="Metric to show. Default: the reward of each run.")] = "",
    sort: Annotated[
        SortChoice,
        typer.Option(help="Order: the newest first, the highest value of the metric, or the lowest loss."),
    ] = "created",
    most: MostShown = 20,
    as_json: Json = False,
    url: UrlOption = LOCAL,
    api_key: ApiKeyOption = "",
) -> None:
    """List checkpoints, the newest first, with the step and metrics of their runs at the save."""
    server = Server(url, api_key)
    choice = {"run": whole_id(server, run)} if run else {}
    if metric:
        choice["metric"] = metric
    found = _read(server, choice, most if sort == "created" else None)
    shown = sorted(found, key=partial(_order, sort))[:most]
    if as_json:
        typer.echo(json.dumps(shown, indent=2))
    elif not shown:
        typer.echo("there are no checkpoints yet")
    else:
        console = consoles.console()
        name = "checkpoint_id" if run else "tinker_path"
        console.print(table_that_fits(HEADINGS, [_row(each, name) for each in shown], console))


@checkpoints.command()
def mark(
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help="tinker:// path; the ID of the run may be cut short."),
    ],
    remove: Annotated[bool, typer.Option("--remove", help="Take the mark away.")] = False,
    url: UrlOption = LOCAL,
    api_key: ApiKeyOption = "",
) -> None:
    """Mark a checkpoint as the best of its run; the mark moves there from the one that had it."""
    try:
        run_id, kind, name = checkpoint_paths.parse(path)
    except InvalidRequest as problem:
        raise StartError(str(problem)) from None
    server = Server(url, api_key)
    run_id = whole_id(server, run_id)
    place = "/".join(quote(part, safe="") for part in (run_id, "checkpoints", kind, name, "best"))
    server.ask(f"training_runs/{place}", method="DELETE" if remove else "POST")
    news = "has no mark any more" if remove else "is marked as the best of its run"
    typer.echo(f"{checkpoint_paths.CheckpointPath(run_id, kind, name)} {news}")


def _order(sort: SortChoice, saved: Saved) -> float:
    """Return the key by which checkpoints are sorted, those without a value last."""
    if sort == "created":
        return 0.0  # they stay as they come
    value = saved[sort]
    return math.inf if value is None else -value if sort == "value" else value


def _read(server: Server, choice: dict[str, str], most: int | None) -> list[Saved]:
    """Return checkpoints, newest first. ``most``: None for all."""
    found, total = list[Saved](), 1
    while len(found) < (total if most is None else min(most, total)):
        limit = PAGE if most is None else min(PAGE, most - len(found))
        asked = urlencode(choice | {"limit": limit, "offset": len(found)})
        page = server.ask(f"/console/api/checkpoints?{asked}")
        found += page["checkpoints"]
        total = page["cursor"]["total_count"] if page["checkpoints"] else 0
    return found


def _row(saved: Saved, name: str) -> list[str]:
    checkpoint = saved["checkpoint"]
    created = datetime.fromisoformat(checkpoint["time"]).astimezone()
    return [
        readable(checkpoint[name]),
        "best" if checkpoint["best"] else "",
        "-" if saved["step"] is None else str(saved["step"]),
        readable(saved["metric"] or "-"),
        _shown(saved["value"]),
        _shown(saved["loss"]),
        created.strftime("%m-%d %H:%M"),
    ]


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
