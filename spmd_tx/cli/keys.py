"""``spmd-tx keys`` manages a server's API keys. A running server notices every change within two seconds."""

import asyncio
import json
import time
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from spmd_tx.cli.options import DEFAULTS, DatabaseUrl, DataDir, Json, in_existing

if TYPE_CHECKING:
    from spmd_tx.coordinator.storage.tables import ApiKeyRow

keys = typer.Typer(
    name="keys",
    no_args_is_help=True,
    help="Create, list, revoke and rotate API keys, also while the server runs. See docs/keys.md.",
)

COLUMNS = ("id", "owner", "role", "made", "ends", "last used", "limits", "state")

KeyId = Annotated[str, typer.Argument(metavar="ID", help="ID of the key, or the beginning of it.")]


@keys.command()
def create(
    owner: Annotated[
        str, typer.Option(help="Owner of the sessions, models and checkpoints made with the key.")
    ],
    role: Annotated[
        Literal["user", "admin", "read-only"],
        typer.Option(help="admin sees what everybody owns; read-only cannot change anything."),
    ] = "user",
    expires_days: Annotated[
        float | None, typer.Option(help="Days until the key expires. Default: never.")
    ] = None,
    adapters: Annotated[
        int | None, typer.Option(help="Maximum number of the owner's adapters at a time. Default: no limit.")
    ] = None,
    queued_requests: Annotated[
        int | None,
        typer.Option(help="Maximum number of the owner's sample requests in the queue. Default: no limit."),
    ] = None,
    queued_tokens: Annotated[
        int | None,
        typer.Option(
            help="Maximum tokens of these requests, prompts and max_tokens together. Default: no limit."
        ),
    ] = None,
    requests_per_second: Annotated[
        float | None, typer.Option(help="Maximum requests per second with the key. Default: no limit.")
    ] = None,
    if_none: Annotated[bool, typer.Option("--if-none", help="Do nothing if there are keys already.")] = False,
    data_dir: DataDir = DEFAULTS.data_dir,
    database_url: DatabaseUrl = None,
) -> None:
    """Create a key and print it. It cannot be shown again: only its hash is stored."""
    from spmd_tx.coordinator.storage.database import in_database
    from spmd_tx.coordinator.tenancy import keys as rows
    from spmd_tx.coordinator.tenancy.callers import KeyLimits

    limits = KeyLimits(adapters, queued_requests, queued_tokens, requests_per_second)
    options = rows.NewKeyOptions(
        owner, role, None if expires_days is None else expires_days * rows.DAY, limits
    )

    async def work(db: Any) -> rows.NewKey | None:
        return None if if_none and await rows.listed(db) else await rows.create(db, options)

    new = asyncio.run(in_database(database_url, data_dir, work))
    if new is None:
        typer.echo("There are keys already (--if-none).", err=True)
        return
    show([new.row], is_error=True)
    typer.echo(new.token)


@keys.command("list")
def list_keys(
    as_json: Json = False,
    data_dir: DataDir = DEFAULTS.data_dir,
    database_url: DatabaseUrl = None,
) -> None:
    """List all keys, also expired and revoked ones. The keys themselves cannot be shown."""
    from spmd_tx.coordinator.tenancy import keys as rows

    listed = in_existing(data_dir, database_url, rows.listed)
    if as_json:
        typer.echo(json.dumps([dict(zip(COLUMNS, _cells(row), strict=True)) for row in listed], indent=2))
    else:
        show(listed)


@keys.command()
def revoke(id: KeyId, data_dir: DataDir = DEFAULTS.data_dir, database_url: DatabaseUrl = None) -> None:
    """Revoke a key. Its owner's sessions, models and checkpoints stay."""
    from spmd_tx.coordinator.tenancy import keys as rows

    async def work(db: Any) -> "ApiKeyRow":
        return await rows.revoke(db, await rows.whole_id(db, id))

    show([in_existing(data_dir, database_url, work)])


@keys.command()
def rotate(
    id: KeyId,
    overlap_hours: Annotated[
        float, typer.Option(min=0, help="Hours for which the old key stays valid; 0 ends it at once.")
    ] = 24.0,
    data_dir: DataDir = DEFAULTS.data_dir,
    database_url: DatabaseUrl = None,
) -> None:
    """Replace a key by a new one with the same owner, role and limits, and print it."""
    from spmd_tx.coordinator.tenancy import keys as rows

    new = in_existing(data_dir, database_url, lambda db: rows.rotate(db, id, overlap_hours * rows.HOUR))
    show([new.row], is_error=True)
    typer.echo(new.token)


@keys.command()
def remove_all(data_dir: DataDir = DEFAULTS.data_dir, database_url: DatabaseUrl = None) -> None:
    """Delete all keys, so that the server asks for none.

    A running server then refuses every request; after its next start it accepts
    everyone.
    """
    from spmd_tx.coordinator.tenancy import keys_seen

    removed = in_existing(data_dir, database_url, lambda db: keys_seen.forget(db, data_dir))
    typer.echo(f"removed {removed} keys; after its next start the server accepts everyone")


def show(rows: Sequence["ApiKeyRow"], is_error: bool = False) -> None:
    """Print keys as a table; ``is_error`` sends it to stderr, so that stdout holds a new key alone."""
    from rich.table import Table

    from spmd_tx.cli.consoles import console

    table = Table(*COLUMNS)
    for row in rows:
        table.add_row(*_cells(row))
    console(is_error).print(table)


def _cells(row: "ApiKeyRow") -> tuple[str, ...]:
    from spmd_tx.coordinator.tenancy.keys import problem

    return (
        row.id,
        row.owner,
        row.role,
        _date(row.created_at),
        _date(row.revoked_at or row.expires_at) or "never",
        _date(row.last_used_at) or "never",
        _limits(row) or "none",
        (problem(row, time.time()) or "is valid").split()[-1],
    )


def _date(seconds: float | None) -> str:
    return "" if seconds is None else datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")


def _limits(row: "ApiKeyRow") -> str:
    limits = {
        "adapters": row.adapters,
        "queued requests": row.queued_requests,
        "queued tokens": row.queued_tokens,
        "requests/s": row.requests_per_second,
    }
    return ", ".join(f"{value:g} {name}" for name, value in limits.items() if value is not None)
