"""``spmd-tx runs`` shows training runs and their metrics, of a server that runs."""

import json
import time
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import quote, urlencode

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from spmd_tx.cli import consoles, run_tables
from spmd_tx.cli.options import Json, MostShown
from spmd_tx.cli.run_tables import LAST_STEPS, Points
from spmd_tx.cli.server import LOCAL, ApiKeyOption, Server, Unreachable, UrlOption
from spmd_tx.coordinator.wire.console.runs import RunSort
from spmd_tx.errors import StartError

EVERY_SECONDS = 2.0
RUNS = "/console/api/runs"
INFIX = ":train:"  # between the session and the number in the ID of a run

RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="ID of the run, or the beginning of it.")]
Metric = Annotated[str | None, typer.Option(help="Metric to draw. Default: the reward, or else the loss.")]

runs = typer.Typer(
    name="runs",
    no_args_is_help=True,
    help="List, show and rename training runs, also while they train. See docs/sessions.md.",
)


@runs.command("list")
def list_runs(
    search: Annotated[
        str,
        typer.Option(
            help="Words that a run has in its ID, name, group, tags, metadata, base model or owner."
        ),
    ] = "",
    sort: Annotated[RunSort, typer.Option(help="Order, the last or greatest first.")] = "created",
    with_archived: Annotated[bool, typer.Option("--all", help="Show archived runs, too.")] = False,
    most: MostShown = 20,
    as_json: Json = False,
    url: UrlOption = LOCAL,
    api_key: ApiKeyOption = "",
) -> None:
    """List training runs, the newest first, with their states and the newest metrics."""
    server, listed, cursor = Server(url, api_key), [], 0
    choice = {"search": search, "sort": sort, "archived": str(with_archived).lower()}
    while cursor is not None and len(listed) < most:
        asked = urlencode(choice | {"limit": min(most - len(listed), 100), "cursor": cursor})
        page = server.ask(f"{RUNS}?{asked}")
        listed, cursor = listed + page["runs"], page["next_cursor"]
    if as_json:
        typer.echo(json.dumps(listed, indent=2))
    elif not listed:
        typer.echo(f"no run has {search!r}" if search else "there are no runs yet")
    else:
        console = consoles.console()
        console.print(run_tables.of_runs(listed, console))


@runs.command()
def show(
    run: RunArgument,
    metric: Metric = None,
    as_json: Json = False,
    url: UrlOption = LOCAL,
    api_key: ApiKeyOption = "",
) -> None:
    """Show the last steps of a run, the curve of a metric, and how the run is."""
    server = Server(url, api_key)
    history = RunHistory(whole_id(server, run))
    history.read(server, -1)
    if as_json:
        typer.echo(json.dumps([*history.points, *history.logged], indent=2))
        return
    console = consoles.console()
    console.print(run_tables.of_run(history.run, history.points, history.logged, metric, console))
    if condition := run_tables.condition(server.ask(_route(history.run))):
        console.print(condition)


@runs.command()
def change(
    run: RunArgument,
    name: Annotated[str | None, typer.Option(help='Name in lists; "" for the one of its client.')] = None,
    group: Annotated[str | None, typer.Option(help='Group that it belongs to; "" for none.')] = None,
    archived: Annotated[
        bool | None, typer.Option("--archive/--restore", help="Leave it out of lists, or show it again.")
    ] = None,
    url: UrlOption = LOCAL,
    api_key: ApiKeyOption = "",
) -> None:
    """Give a run another name or group in lists, or archive it. Nothing is deleted."""
    asked = {"name": name, "group": group, "archived": archived}
    given = {key: value for key, value in asked.items() if value is not None}
    if not given:
        raise StartError("there is nothing to change; give --name, --group, --archive or --restore")
    server = Server(url, api_key)
    body = {key: None if value == "" else value for key, value in given.items()}
    changed = server.ask(_route(whole_id(server, run)), body, method="PATCH")
    console = consoles.console()
    console.print(run_tables.of_runs([changed], console))


@runs.command()
def tail(run: RunArgument, metric: Metric = None, url: UrlOption = LOCAL, api_key: ApiKeyOption = "") -> None:
    """Show a run while it trains, until Ctrl-C.

    Where the output is no terminal, it prints a line per step.
    """
    server, console = Server(url, api_key), consoles.console()
    history = RunHistory(whole_id(server, run))
    history.read(server, -1)
    try:
        if console.is_terminal:
            _redraw(server, history, metric, console)
        else:
            _print_lines(server, history)
    except KeyboardInterrupt:
        raise typer.Exit from None


@dataclass
class RunHistory:
    """Holds what is known of a run."""

    run: str
    points: Points = field(default_factory=list)  # of the server's steps
    _logged: dict[int, dict[str, Any]] = field(default_factory=dict)  # by the client's own step
    _logged_after: int = -1  # number of the last entry that was read

    @property
    def logged(self) -> Points:
        """What the client has sent of steps that it counts by itself, in their order."""
        return [self._logged[step] for step in sorted(self._logged)]

    def read(self, server: Server, after: int | None) -> Points:
        """Read the server's steps behind a place, and return what is new of the client's own steps."""
        points, steps = list[dict[str, Any]](), set[int]()
        more = True
        while more:
            places = f"logged_after={self._logged_after}&after={after}"
            page = server.ask(f"training_runs/{quote(self.run, safe='')}/metrics?{places}")
            points += page["points"]
            for entry in page.get("logged", ()):
                known = self._logged.get(entry["step"], {"metrics": {}})
                self._logged[entry["step"]] = entry | {"metrics": known["metrics"] | entry["metrics"]}
                self._logged_after = entry["number"]
                steps.add(entry["step"])
            more = page["next_after"] is not None or page.get("next_logged_after") is not None
            after = points[-1]["seq"] if points else after
        self.points += points
        return [self._logged[step] for step in sorted(steps)]

    def read_on(self, server: Server) -> Points:
        """Read what is new, and the last steps as they are now, and return as ``read`` does."""
        again = self.points[-LAST_STEPS - 1]["seq"] if len(self.points) > LAST_STEPS else -1
        known, self.points = self.points, self.points[: max(0, len(self.points) - LAST_STEPS)]
        try:
            return self.read(server, again)
        except Unreachable:
            self.points = known
            raise


def _redraw(server: Server, history: RunHistory, metric: str | None, console: Console) -> None:
    def view() -> Group:
        rows = max(1, min(LAST_STEPS, console.height - run_tables.LINES_BESIDE))
        steps = run_tables.of_steps(history.run, history.points, metric, console, rows)
        lines = [run_tables.line_of_client(each) for each in history.logged[-1:]]
        return Group(steps, *map(Text, lines))

    with Live(view(), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(EVERY_SECONDS)
            try:
                history.read_on(server)
            except Unreachable as error:
                live.update(Group(view(), Text(f"{error}; trying again", style="yellow")), refresh=True)
            else:
                live.update(view(), refresh=True)


def _print_lines(server: Server, history: RunHistory) -> None:
    """Print a line per step, a look later than it was seen, as clients add their metrics after it."""
    printed, is_told, news = -1, False, history.logged
    while True:
        for each in news:
            typer.echo(run_tables.line_of_client(each))
        known = history.points[-1]["seq"] if history.points else -1
        time.sleep(EVERY_SECONDS)
        try:
            news = history.read_on(server)
        except Unreachable as error:
            if not is_told:
                typer.echo(f"spmd-tx: {error}; trying again", err=True)
            is_told, news = True, []
            continue
        is_told = False
        for point in history.points:
            if printed < point["seq"] <= known:
                typer.echo(run_tables.line(point))
                printed = point["seq"]


def _route(run: str) -> str:
    return f"{RUNS}/{quote(run, safe='')}"


def whole_id(server: Server, beginning: str) -> str:
    """Return the ID of the run that begins so. Raises StartError when there is none, or more than one."""
    if INFIX in beginning:
        return beginning  # and the server says whether there is such a run
    page = server.ask(f"{RUNS}?limit=2&beginning={quote(beginning, safe='')}")
    matching = [run["id"] for run in page["runs"] if run["id"].startswith(beginning)]
    if not matching or not beginning:
        raise StartError(f"there is no run {beginning!r}; spmd-tx runs list shows the IDs")
    if len(matching) > 1:
        raise StartError(f"{' and '.join(matching)} begin with {beginning!r}; give more of the ID")
    return matching[0]
