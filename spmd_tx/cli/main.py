"""The command ``spmd-tx``. Subcommands import what they need when they run, so that help is instant.

Docstrings of subcommands are their help texts, and short in their lines for that.
"""

import asyncio
import errno
import logging
import os
import signal
import sys
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from spmd_tx.byte_sizes import show_size
from spmd_tx.cli.checkpoints import checkpoints
from spmd_tx.cli.environment import check_variables
from spmd_tx.cli.export_weights import export_weights
from spmd_tx.cli.import_weights import import_weights
from spmd_tx.cli.keys import keys
from spmd_tx.cli.options import (
    DEFAULTS,
    DatabaseUrl,
    DataDir,
    GroupOption,
    Limit,
    read_limits,
    takes_options,
)
from spmd_tx.cli.other_names import translated
from spmd_tx.cli.plan import plan
from spmd_tx.cli.requests import requests
from spmd_tx.cli.runs import runs
from spmd_tx.cli.server import Server
from spmd_tx.cli.train import train
from spmd_tx.cli.watch import watch
from spmd_tx.config import ServerConfig
from spmd_tx.demo import tiny_families
from spmd_tx.errors import StartError
from spmd_tx.group_options import read_pairs, with_groups
from spmd_tx.options import MANY
from spmd_tx.processes import private
from spmd_tx.processes.environments import past_proxies
from spmd_tx.processes.interrupts import ended_by_interrupts

app = typer.Typer(
    help="Post-train language models through the Tinker API on your own accelerators.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

LOST_OUTPUT = (errno.ENOSPC, errno.EIO)  # on a full disk, or a terminal that is gone
INTERRUPTED = 128 + signal.SIGINT  # the exit code, as of a shell


@app.command()
@takes_options("serve")
def serve(*, limit: Limit = [], group: GroupOption = [], **options: Any) -> None:  # noqa: B006
    """Serve the Tinker API for one base model, or for several.

    Prints "ready: URL" once it can serve requests. Every option can also be
    set in the environment, as SPMD_TX_<NAME>, or in the file of --config, by
    its name with underscores. The command line overrides the environment,
    which overrides the file.
    """
    del options["config"]  # its values came in as defaults of the other options
    config = ServerConfig(bounds=read_limits(limit), **options)
    config = with_groups(config, map(read_pairs, group))
    with ended_by_interrupts():
        from spmd_tx.coordinator.runtime import event_loop
        from spmd_tx.coordinator.server import serve as server

    raise typer.Exit(event_loop.run(server.serve(config)))


app.command()(plan)
app.command("import")(import_weights)
app.command("export")(export_weights)
app.command()(watch)


@app.command()
@takes_options("worker", has_file=False)
def worker(
    coordinator: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            envvar="SPMD_TX_COORDINATOR",
            help="Host where spmd-tx serve runs, with its --worker-port.",
        ),
    ],
    process_id: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=MANY,
            envvar="SPMD_TX_PROCESS_ID",
            help="Number of this process among the server's --num-processes, from 0. Groups with replicas "
            "give out numbers themselves.",
        ),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Devices of this process; they must fit the mesh. Default: what the mesh needs.",
        ),
    ] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(
            envvar="SPMD_TX_SECRET_FILE",
            help="File with the secret that all hosts share. Default: SPMD_TX_SECRET of the environment.",
        ),
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(
            envvar="SPMD_TX_BASE_MODEL",
            help="Hugging Face ID or directory of the model on this host. Default: the server's directory.",
        ),
    ] = None,
    group: Annotated[
        str,
        typer.Option(
            envvar="SPMD_TX_GROUP",
            help="Group of the server that the process belongs to. Default: the one of the server's own "
            "options.",
        ),
    ] = "",
    coordinator_timeout: Annotated[
        float,
        typer.Option(min=1, max=MANY, help="Seconds without the coordinator until this process exits."),
    ] = 600,
    leave_seconds: Annotated[
        float,
        typer.Option(
            min=0,
            max=MANY,
            help="Seconds after SIGTERM in which the server may finish or move what the worker does.",
        ),
    ] = 20,
    **options: Any,
) -> None:
    """Run one worker process of a server on another host.

    Starts the worker when the server asks for it, starts it again after a
    crash, and waits while the server restarts. Exits with code 0 when the
    server has shut down.
    """
    with ended_by_interrupts():
        from spmd_tx.coordinator.agent import main as remote_agent
        from spmd_tx.coordinator.agent.agent import AgentOptions
        from spmd_tx.protocol.agents import ANY_PROCESS

    agent_options = AgentOptions(
        coordinator=coordinator,
        process=ANY_PROCESS if process_id is None else process_id,
        secret=remote_agent.shared_secret(secret_file),
        devices=devices,
        base_model=base_model,
        group=group,
        patience=coordinator_timeout,
        leave_seconds=leave_seconds,
    )
    raise typer.Exit(asyncio.run(remote_agent.run(agent_options, **options)))


FamilyOption = Annotated[
    str,
    typer.Option(help=f"Kind of the model, or a model of that kind: {', '.join(tiny_families.FAMILIES)}."),
]


@app.command()
def demo(
    learning_rate: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Adam's learning rate; with 0 the reward must stay flat. Default: 0.006, or 0.01 for all "
            "weights.",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(min=10, help="Steps of reinforcement learning.")] = 40,
    out: Annotated[Path, typer.Option(help="Folder for the model, the server's data and the plot.")] = Path(
        "demo"
    ),
    family: FamilyOption = "qwen3",
    full_parameters: Annotated[
        bool, typer.Option("--full-parameters", help="Train all weights instead of an adapter.")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the server and its console open at the end, until Ctrl-C.")
    ] = False,
) -> None:
    """Start a server, train a tiny model with it, and plot the reward."""
    from spmd_tx.demo import run

    def report(url: str, of: str, metrics: dict[str, float]) -> None:
        Server(url, "").ask(f"training_runs/{quote(of, safe='')}/metrics", {"metrics": metrics})

    rate = (0.01 if full_parameters else 0.006) if learning_rate is None else learning_rate
    name = tiny_families.family_named(family)
    raise typer.Exit(run.run(run.DemoOptions(rate, steps, out, name, full_parameters, keep), report))


@app.command()
def make_model(
    directory: Annotated[
        Path, typer.Argument(metavar="DIRECTORY", help="Folder to write to; created if it is missing.")
    ],
    preset: Annotated[str, typer.Option(help="Shape of the model: tiny, tiny-gqa or tiny-moe.")] = "tiny",
    family: FamilyOption = "qwen3",
    vision: Annotated[
        bool, typer.Option("--vision", help="With a vision tower, which only some models of qwen3_5 have.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Random seed; the same seed gives the same bytes.")] = 0,
) -> None:
    """Write a small random checkpoint in the Hugging Face layout."""
    from spmd_tx.demo import tiny_model

    if preset not in tiny_model.PRESETS:
        raise StartError(f"--preset is {preset!r}; presets: {', '.join(tiny_model.PRESETS)}")
    name = tiny_families.family_named(family)
    spec = replace(tiny_model.PRESETS[preset], family=name, sees=vision)
    typer.echo(tiny_model.write(directory, spec, seed))


@app.command()
@takes_options("gc", has_file=False)
def gc(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be deleted.")] = False,
    data_dir: DataDir = DEFAULTS.data_dir,
    database_url: DatabaseUrl = None,
    **options: Any,
) -> None:
    """Delete expired and unused data of a stopped server.

    A running server does this by itself. Give it the same options as
    "spmd-tx serve", or the same environment.
    """
    from spmd_tx.coordinator.retention import reaper

    config = ServerConfig(base_model="", **options)
    reaped = asyncio.run(reaper.collect(data_dir, database_url, config, dry_run))
    typer.echo(reaper.table(reaped))
    if dry_run:
        typer.echo("Nothing was deleted (--dry-run).")


@app.command()
def backup(
    destination: Annotated[
        Path, typer.Argument(metavar="DESTINATION", help="New folder to write to, on another disk.")
    ],
    data_dir: DataDir = DEFAULTS.data_dir,
) -> None:
    """Copy a server's data, including its SQLite database, also while it runs.

    To restore, start a server with the copy as its --data-dir.
    """
    from spmd_tx.coordinator.retention import backup

    size = backup.back_up(data_dir, destination)
    typer.echo(f"{show_size(size)} are in {destination}")


app.add_typer(checkpoints)
app.add_typer(keys)
app.add_typer(requests)
app.add_typer(runs)
app.add_typer(train)


@app.command()
def version() -> None:
    """Print the versions of spmd-tx, Python and JAX."""
    python = ".".join(map(str, sys.version_info[:3]))
    typer.echo(f"spmd-tx {metadata.version('spmd_tx')}, Python {python}, JAX {metadata.version('jax')}")


def _print_version(is_asked: bool) -> None:
    if is_asked:
        version()
        raise typer.Exit


@app.callback()
def before_commands(
    context: typer.Context,
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the versions and exit."
        ),
    ] = False,
) -> None:
    """Take the options that stand before a command."""
    check_variables(context.command, os.environ)


def main() -> None:
    """Run the command line. Errors that the operator can fix are printed in one line, without a traceback."""
    os.environ.update(past_proxies(os.environ))
    private.hide_password()
    private.keep_files()
    try:
        arguments, notes = translated(sys.argv[1:])
        for note in notes:
            typer.echo(f"spmd-tx: {note}", err=True)
        app(arguments)
    except StartError as error:
        from spmd_tx.coordinator.runtime import logs

        if logs.is_json():
            logging.getLogger("spmd_tx").critical("%s", error)
        else:
            typer.echo(f"spmd-tx: {error}", err=True)
        sys.exit(2)
    except OSError as error:
        if error.filename is not None or error.errno not in LOST_OUTPUT:
            raise
        with suppress(OSError):
            typer.echo(
                f"spmd-tx: cannot write: {error.strerror}; make room, or send the output elsewhere", err=True
            )
        os._exit(1)  # what is still buffered could not be printed either
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
