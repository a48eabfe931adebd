"""``spmd-tx requests`` shows what is in a server's queue and gives up single requests."""

import json
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from spmd_tx.cli.options import DEFAULTS, DatabaseUrl, DataDir, Json, MostShown, in_existing
from spmd_tx.errors import DamagedBody, StartError

if TYPE_CHECKING:
    from spmd_tx.coordinator.requests.overview import Overview

requests = typer.Typer(
    name="requests",
    no_args_is_help=True,
    help="List, show and give up requests, also while the server runs. See docs/operations.md.",
)

RequestId = Annotated[str, typer.Argument(metavar="ID", help="ID of the request, or the beginning of it.")]

SHOWN = 8  # characters of ids in tables; spmd-tx requests takes the beginning of one
LOSSES = ("losses", "by command", "of server")


@requests.command("list")
def list_requests(
    owner: Annotated[str | None, typer.Option(help="Only requests of this owner.")] = None,
    kind: Annotated[
        str | None, typer.Option(help="Only requests of this kind, such as forward_backward.")
    ] = None,
    with_finished: Annotated[
        bool, typer.Option("--all", help="Show finished requests, too, the newest first.")
    ] = False,
    most: MostShown = 100,
    as_json: Json = False,
    data_dir: DataDir = DEFAULTS.data_dir,
    database_url: DatabaseUrl = None,
) -> None:
    """List the requests that have no result yet, the oldest first."""
    from spmd_tx.coordinator.requests import overview

    overviews, count = in_existing(
        data_dir,
        database_url,
        lambda db: overview.listed(db, owner, kind, with_finished=with_finished, most=most),
        only_reads=True,
    )
    if as_json:
        typer.echo(json.dumps([_facts(each) for each in overviews], indent=2))
        return
    _print_table(overviews)
    if len(overviews) < count:
        typer.echo(f"{count - len(overviews)} more; --most shows more, --owner and --kind choose")


@requests.command()
def show(
    id: RequestId,
    as_json: Json = False,
    data_dir: DataDir = DEFAULTS.data_dir,
    database_url: DatabaseUrl = None,
) -> None:
    """Show everything that is known about a request, with a summary of its body."""
    request = _find(id, data_dir, database_url)
    size, body = _body(request, data_dir)
    facts = _facts(request) | {"body bytes": size}
    if as_json:
        typer.echo(json.dumps(facts | {"body": body}, indent=2))
        return
    for name, value in facts.items():
        if value is not None:
            typer.echo(f"{name + ':':<23} {value}")
    typer.echo("body:")
    for line in body:
        typer.echo(f"  {line}")


@requests.command()
def fail(
    id: RequestId,
    reason: Annotated[str, typer.Option(help="Reason, which the client sees. Default: none.")] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    refuse_model: Annotated[
        bool,
        typer.Option(
            "--refuse-model",
            help="Give up the model of a finished request that is run again to restore the model and crashes "
            "the server each time.",
        ),
    ] = False,
    data_dir: DataDir = DEFAULTS.data_dir,
    database_url: DatabaseUrl = None,
) -> None:
    """Give up a request: its client gets an error, and everything else continues.

    A running server does so within two seconds, a stopped one at its next
    start, before it begins others. A request that may have changed its model
    already is not given up and keeps its result.
    """
    from spmd_tx.coordinator.requests import overview

    overview.checked(reason)

    async def write(db: Any) -> bool:
        if refuse_model:
            await overview.refuse_model(db, request, reason)
            return True
        return await overview.give_up(db, request, reason)

    request = _find(id, data_dir, database_url)
    _check(request, refuse_model)
    _print_table([request])
    if not yes:
        typer.confirm("Give up its model?" if refuse_model else "Give it up?", abort=True)
    if not in_existing(data_dir, database_url, write):
        typer.echo(f"Request {request.row.id} has finished meanwhile; its result stands.")
    elif refuse_model:
        typer.echo(
            f"From the next start of workers on, request {request.row.seq_id} of {request.row.line} is not "
            "run again, and the model's requests fail."
        )
    else:
        typer.echo(
            "Given up. A running server fails it within two seconds, unless it has begun and may have "
            "changed its model; a stopped one fails it at its next start."
        )


def _check(request: "Overview", refuse_model: bool) -> None:
    """Raise StartError if the request, or its model, cannot be given up."""
    row = request.row
    if refuse_model and not request.may_be_run_again:
        raise StartError(
            f"request {row.id} is not run again to restore a model: {row.kind}, {request.state}; "
            "leave out --refuse-model"
        )
    if not refuse_model and row.finished_at is not None:
        advice = "; if running it again ends the server, --refuse-model gives up its model"
        raise StartError(
            f"request {row.id} has an outcome already ({request.state}), and nothing is to be done"
            + (advice if request.may_be_run_again else "")
        )


def _body(request: "Overview", data_dir: Path) -> tuple[int | None, list[str]]:
    """Return the size of the body in bytes, if it can be read, and the lines of its summary."""
    from spmd_tx.coordinator.requests.body_summary import summary
    from spmd_tx.coordinator.requests.payload_files import read_body
    from spmd_tx.coordinator.requests.rows import payload_of

    try:
        body = read_body(data_dir / "payloads", payload_of(request.row))
    except (DamagedBody, OSError) as error:
        return None, [f"cannot be read: {error}"]
    return len(body), summary(request.row.kind, body)


def _facts(request: "Overview") -> dict[str, Any]:
    """Return what is shown about a request, in this order; None where something is not known."""
    from spmd_tx.coordinator.requests.body_summary import clean

    row = request.row
    return {
        "id": row.id,
        "kind": row.kind,
        "line": row.line,
        "seq_id": row.seq_id,
        "owner": request.owner,
        "session": row.session_id,
        "state": request.state,
        "accepted": _date(row.created_at),
        "began": _date(row.began_at),
        "first command sent": _date(row.sent_at),
        "last command answered": _date(row.replied_at),
        "ended": _date(row.finished_at),
        "losses": row.losses,
        "losses by command": row.losses_by_command,
        "losses of the server": row.coordinator_losses,
        "given up because": "no reason given" if row.given_up == "" else row.given_up,
        "model given up because": "no reason given" if row.never_again == "" else row.never_again,
        "error": None if row.error is None else clean(row.error),
        "category": row.category,
    }


def _print_table(overviews: "list[Overview]") -> None:
    from rich.table import Table

    from spmd_tx.cli.consoles import console

    table = Table(box=None, pad_edge=False)
    for name in ("id", "kind", "line", "seq_id", "owner", "age", *LOSSES, "state"):
        table.add_column(name, overflow="fold")
    for each in overviews:
        row = each.row
        line = f"{row.line[:SHOWN]}...{row.line.removeprefix(row.session_id)}"
        request = row.id[:SHOWN], row.kind, line, row.seq_id, each.owner, _age(row.created_at)
        losses = row.losses, row.losses_by_command, row.coordinator_losses
        table.add_row(*map(str, (*request, *losses, each.state)))
    console().print(table)


def _find(id: str, data_dir: Path, database_url: str | None) -> "Overview":
    from spmd_tx.coordinator.requests import overview

    return in_existing(data_dir, database_url, lambda db: overview.find(db, id), only_reads=True)


def _date(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds).astimezone().isoformat(" ", "seconds")


def _age(since: float) -> str:
    seconds = max(0.0, time.time() - since)
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
