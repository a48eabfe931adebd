"""The command line: ``spmd-tx``. Commands import what they need when they run, so that help is instant."""

import asyncio
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from spmd_tx.byte_sizes import show_size
from spmd_tx.cli.keys import keys
from spmd_tx.cli.options import DEFAULTS, DatabaseUrl, DataDir, read_limits, server_options
from spmd_tx.cli.plan import plan
from spmd_tx.cli.requests import requests
from spmd_tx.config import ServerConfig
from spmd_tx.errors import StartError
from spmd_tx.processes import private

app = typer.Typer(
    help="Post-train language models through the Tinker API on your own accelerators.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def serve(**options: Any) -> None:
    """Serve the Tinker API for one base model.

    Prints "ready: URL" once a request would be served at once. Every option can also be set as
    SPMD_TX_<NAME> in the environment, or under its name with underscores in the file of --config;
    the command line overrides the environment, and that the file.
    """
    del options["config"]  # its values came in as defaults of the other options
    config = ServerConfig(bounds=read_limits(options.pop("limit")), **options)
    from spmd_tx.coordinator.runtime import event_loop
    from spmd_tx.coordinator.server import serve as server

    raise typer.Exit(event_loop.run(server.serve(config)))


serve.__signature__ = server_options()  # pyright: ignore[reportFunctionMemberAccess]
app.command()(serve)
app.command()(plan)


@app.command()
def worker(
    coordinator: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            envvar="SPMD_TX_COORDINATOR",
            help="Where spmd-tx serve runs, and its --worker-port.",
        ),
    ],
    process_id: Annotated[
        int,
        typer.Option(
            min=0,
            envvar="SPMD_TX_PROCESS_ID",
            help="Which of the --num-processes of the server this is, from 0.",
        ),
    ],
    devices: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Devices of this process, to be checked against the mesh. Default: what the mesh needs.",
        ),
    ] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(
            envvar="SPMD_TX_SECRET_FILE",
            help="File with the secret that all hosts share. Default: the environment's SPMD_TX_SECRET.",
        ),
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(
            envvar="SPMD_TX_BASE_MODEL",
            help="Hugging Face id or directory of the model on this host. Default: the server's directory.",
        ),
    ] = None,
    coordinator_timeout: Annotated[
        float, typer.Option(min=1, help="Seconds without the coordinator until this process ends.")
    ] = 600,
) -> None:
    """Run one worker process of a server on another host.

    Starts the worker when the server wants it, starts it again after a loss, and waits for a server that is
    restarted. Ends with exit code 0 when the server ends in order.
    """
    from spmd_tx.coordinator.agent import main as remote_agent
    from spmd_tx.coordinator.agent.agent import AgentOptions

    options = AgentOptions(
        coordinator=coordinator,
        process=process_id,
        secret=remote_agent.shared_secret(secret_file),
        devices=devices,
        base_model=base_model,
        patience=coordinator_timeout,
    )
    raise typer.Exit(asyncio.run(remote_agent.run(options)))


@app.command()
def demo(
    learning_rate: Annotated[
        float, typer.Option(min=0, help="Of Adam; 0 shows that none is learned.")
    ] = 0.006,
    steps: Annotated[int, typer.Option(min=10, help="Of reinforcement learning.")] = 40,
    out: Annotated[Path, typer.Option(help="Folder for model, server data and plot.")] = Path("demo"),
) -> None:
    """Train a tiny model against a server started for it, and plot the reward."""
    from spmd_tx.demo import run

    raise typer.Exit(run.run(learning_rate, steps, out))


@app.command()
def make_model(
    directory: Annotated[Path, typer.Argument(help="Folder to write; made if it is not there.")],
    preset: Annotated[str, typer.Option(help="Shape of the model: tiny, tiny-gqa or tiny-moe.")] = "tiny",
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same bytes.")] = 0,
) -> None:
    """Write a small random Qwen3 checkpoint in the Hugging Face layout."""
    from spmd_tx.demo import tiny_model

    if preset not in tiny_model.PRESETS:
        raise StartError(f"--preset is {preset!r}; presets: {', '.join(tiny_model.PRESETS)}")
    typer.echo(tiny_model.write(directory, tiny_model.PRESETS[preset], seed))


@app.command()
def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would go.")] = False,
    data_dir: DataDir = DEFAULTS.data_dir,
    database_url: DatabaseUrl = None,
    keep_results_hours: Annotated[float, typer.Option(min=0)] = DEFAULTS.keep_results_hours,
    keep_versions_hours: Annotated[float, typer.Option(min=0)] = DEFAULTS.keep_versions_hours,
    keep_audit_days: Annotated[float, typer.Option(min=1)] = DEFAULTS.keep_audit_days,
    max_compilation_cache: str = DEFAULTS.max_compilation_cache,
) -> None:
    """Delete what nobody needs any more from the data of a stopped server.

    A running server does that by itself. The options are those of "spmd-tx serve".
    """
    from spmd_tx.coordinator.retention import reaper
    from spmd_tx.coordinator.retention.reaper import limits_of

    config = ServerConfig(
        base_model="",
        keep_results_hours=keep_results_hours,
        keep_versions_hours=keep_versions_hours,
        keep_audit_days=keep_audit_days,
        max_compilation_cache=max_compilation_cache,
    )
    reaped = asyncio.run(reaper.collect(data_dir, database_url, limits_of(config), dry_run))
    typer.echo(reaper.table(reaped))
    if dry_run:
        typer.echo("Nothing was deleted (--dry-run).")


@app.command()
def backup(
    destination: Annotated[Path, typer.Argument(help="New folder to write to, on another disk.")],
    data_dir: DataDir = DEFAULTS.data_dir,
) -> None:
    """Copy a server's data with its SQLite database, also while it runs.

    To restore, start a server with the copy as its --data-dir.
    """
    from spmd_tx.coordinator.retention import backup

    size = backup.back_up(data_dir, destination)
    typer.echo(f"{show_size(size)} are in {destination}")


app.add_typer(keys)
app.add_typer(requests)


@app.command()
def version() -> None:
    """Print the versions of spmd-tx, Python and JAX."""
    python = ".".join(map(str, sys.version_info[:3]))
    typer.echo(f"spmd-tx {metadata.version('spmd_tx')}, Python {python}, JAX {metadata.version('jax')}")


def main() -> None:
    """Run the command line; what the operator can fix is said in one line."""
    private.hide_password()
    private.keep_files()
    try:
        app()
    except StartError as error:
        typer.echo(f"spmd-tx: {error}", err=True)
        sys.exit(2)
