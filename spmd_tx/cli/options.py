"""Reads options: the command line overrides the environment, then come the TOML file and the defaults."""

import asyncio
import inspect
import os
import tomllib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from spmd_tx.bounds import Bounds, bounds_of
from spmd_tx.config import OPTIONS, ServerConfig, options_of
from spmd_tx.errors import StartError
from spmd_tx.group_options import as_pairs
from spmd_tx.options import AUTO

Result = TypeVar("Result")

LIMITS, GROUPS = "limits", "groups"  # the tables in a TOML file

DEFAULTS = ServerConfig(base_model="")


def environment_variable(name: str) -> str:
    return f"SPMD_TX_{name.upper()}"


# For commands that look at the data of a server
DataDir = Annotated[
    Path,
    typer.Option(
        envvar=environment_variable("data_dir"), show_envvar=False, help="Data directory of the server."
    ),
]
DatabaseUrl = Annotated[
    str | None,
    typer.Option(
        envvar=environment_variable("database_url"),
        show_envvar=False,
        help="Database of the server, if it is not SQLite in --data-dir.",
    ),
]
# For commands that list
MostShown = Annotated[int, typer.Option(min=1, max=10_000, help="Maximum number of entries to show.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]


def in_existing(
    data_dir: Path,
    database_url: str | None,
    work: Callable[[Any], Awaitable[Result]],
    *,
    only_reads: bool = False,
) -> Result:
    """Do work in a transaction on the database of a server that has been started before.

    Raises StartError if it has none.
    """
    from spmd_tx.coordinator.storage.database import check_exists, in_database

    check_exists(database_url, data_dir)
    return asyncio.run(in_database(database_url, data_dir, work, only_reads=only_reads))


def parse_parallel_size(value: int | str) -> int | str:
    """Read a size of the mesh: a number, or "auto"."""
    if value == AUTO:
        return AUTO
    try:
        return int(value)
    except ValueError:
        raise typer.BadParameter(f"{value!r} is neither a number nor {AUTO}") from None


def use_toml_file(context: typer.Context, config: Path | None) -> None:
    """Make the file's values the defaults of the options that are read after this one."""
    if config is not None:
        values = read_toml(config)
        context.meta[LIMITS] = values.pop(LIMITS, {})
        context.meta[GROUPS] = values.pop(GROUPS, [])
        context.default_map = values


def gather_limits(context: typer.Context, limit: list[str]) -> list[str]:
    """Collect the pairs of file, environment and command line, in this order."""
    of_file = [f"{name}={value}" for name, value in context.meta.get(LIMITS, {}).items()]
    return [*of_file, os.environ.get(environment_variable("limit"), ""), *limit]


def gather_groups(context: typer.Context, group: list[str]) -> list[str]:
    """Collect the groups of the file, and then those of the command line."""
    return [*map(as_pairs, context.meta.get(GROUPS, [])), *group]


def find_group(context: typer.Context, group: str) -> str:
    """Return the pairs of the group of the file that has this name; "" for none. Raises StartError."""
    if not group:
        return ""
    groups = {str(values.get("name")): values for values in context.meta.get(GROUPS, [])}
    if group not in groups:
        known = ", ".join(groups) or "none"
        raise StartError(f"--group is {group}; the groups of the file of --config are {known}")
    return as_pairs(groups[group])


def read_limits(limit: list[str]) -> Bounds:
    """Apply pairs as they are given to ``--limit``; later ones override earlier ones. Raises StartError."""
    values = {}
    for pair in ",".join(limit).split(","):
        if pair.strip():
            name, equals, value = pair.partition("=")
            if not equals:
                raise StartError(f"--limit {pair.strip()} has no value; write it as NAME=VALUE")
            values[name.strip()] = value.strip()
    return bounds_of(values)


def read_toml(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartError(f"cannot read --config {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StartError(f"--config {path} is not valid TOML: {error}; correct it there") from None
    except RecursionError:
        raise StartError(f"--config {path} is nested too deeply; no option needs that") from None
    known = [*OPTIONS, LIMITS, GROUPS]
    unknown = sorted(values.keys() - set(known))
    if unknown:
        raise StartError(f"{path} sets {', '.join(unknown)}; valid keys are {', '.join(known)}")
    if not isinstance(values.get(LIMITS, {}), dict):
        raise StartError(
            f"{path} sets limits to a {type(values[LIMITS]).__name__}; make it a table, [limits]"
        )
    groups = values.get(GROUPS, [])
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise StartError(f"{path} sets groups to no list of tables; write each group below a line [[groups]]")
    return values


CONFIG = inspect.Parameter(
    "config",
    inspect.Parameter.KEYWORD_ONLY,
    annotation=Annotated[
        Path | None,
        typer.Option(
            envvar=environment_variable("config"),
            show_envvar=False,
            help="TOML file with any of the options below, such as base_model = '...'. "
            "The command line and the environment override it.",
            callback=use_toml_file,
            is_eager=True,
        ),
    ],
    default=None,
)
Limit = Annotated[
    list[str],
    typer.Option(
        rich_help_panel="Bounds on clients",
        metavar="NAME=VALUE",
        envvar=environment_variable("limit"),
        show_envvar=False,
        show_default=False,
        help="Change a bound on what clients may ask for, as in --limit stop_strings=128; can be repeated. "
        "docs/limits.md lists all bounds with their defaults. In the environment, separate them by commas; "
        "in the file of --config, put them into a table called limits.",
        callback=gather_limits,
    ),
]


GroupOption = Annotated[
    list[str],
    typer.Option(
        rich_help_panel="Groups",
        metavar="name=NAME,base_model=MODEL,...",
        show_default=False,
        help="Serve one more base model beside the first one, with workers of its own; can be repeated. "
        "docs/groups.md has the options that a group may have, and how the file of --config lists groups.",
        callback=gather_groups,
    ),
]


GroupNameOption = Annotated[
    str,
    typer.Option(
        show_default=False,
        help="Plan for this group of the file of --config. Default: for the first one, which the other "
        "options describe.",
        callback=find_group,
    ),
]


def takes_options(command: str, *, has_file: bool = True) -> Callable[[Callable[..., None]], Any]:
    """Give a command options of the server in place of its ``**options``, by the signature that typer reads.

    With ``has_file`` they have headings, and their values may be in the file of ``--config``.
    """

    def added(function: Callable[..., None]) -> Callable[..., None]:
        *before, _ = inspect.signature(function).parameters.values()
        shared = [_parameter(name, has_heading=has_file) for name in options_of(command)]
        parameters = [CONFIG, *shared, *before] if has_file else [*before, *shared]
        function.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
        return function

    return added


def _parameter(name: str, *, has_heading: bool) -> inspect.Parameter:
    option, default = OPTIONS[name], getattr(DEFAULTS, name)
    is_number_or_auto = option.accepts.may_be_auto
    typer_option = typer.Option(
        rich_help_panel=option.heading if has_heading else None,
        parser=parse_parallel_size if is_number_or_auto else None,
        metavar="NUMBER" if is_number_or_auto else None,
        help=option.help,
        envvar=environment_variable(name),
        show_envvar=False,
        show_default=default is not None,
    )
    annotation = Annotated[str if is_number_or_auto else option.type, typer_option]
    if name == "base_model":
        default = inspect.Parameter.empty
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
