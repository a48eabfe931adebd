"""How ServerConfig is filled: command line before environment before TOML file before defaults."""

import inspect
import os
import tomllib
import typing
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from spmd_tx.bounds import Bounds, bounds_of
from spmd_tx.config import ServerConfig
from spmd_tx.errors import StartError

# Every field of ServerConfig, under the heading where --help shows it.
HELP = {
    "Model": {
        "base_model": "Hugging Face id or directory of the frozen base model.",
        "served_model_name": "Name by which clients ask for the model. Default: the value of --base-model.",
        "dtype": "Type of the base weights and of the arithmetic; auto is float32 on CPUs, else bfloat16.",
        "max_context_length": "Longest prompt with its answer, in tokens. Default: the model's own limit.",
    },
    "Mesh": {
        "fully_sharded_data_parallel_size": "Ways to split rows, adapters and optimizer state.",
        "expert_parallel_size": "More ways to split rows; the experts of a mixture are split over it.",
        "tensor_parallel_size": "Ways to split the base weights and every matrix product.",
        "shard_base_weights": "Whether the first of these splits the base weights, too; auto does it when "
        "they would take more than half of a device's memory.",
        "num_processes": "Worker processes; each takes an equal part of the devices. The three sizes above "
        "multiply to the number of devices.",
    },
    "Adapters": {
        "max_lora_adapters": "LoRA adapters that are on the device at once, for training. Others, however "
        "many, wait in host memory or on disk.",
        "max_lora_rank": "Largest LoRA rank that a client may ask for.",
    },
    "Server": {
        "host": "Address to listen on; 0.0.0.0 for all of this machine's.",
        "port": "TCP port to listen on; 0 takes a free one.",
        "insecure_no_auth": "Listen on --host even though there are no API keys: everyone who can reach the "
        "port has access to everything. Has no effect once there are keys.",
        "trusted_proxies": "Addresses and networks, as 10.0.0.0/8, of proxies before the server that may say "
        "by X-Forwarded-Proto, -Host and -Prefix what its address is for clients.",
        "data_dir": "Where requests, results and checkpoints are kept.",
        "checkpoints_base": "Where named checkpoints are kept: a directory that all hosts see, or a URL of "
        "fsspec as s3://bucket/path or gs://bucket/path. Default: in --data-dir.",
        "database_url": "SQLAlchemy URL, for instance postgresql+asyncpg://user@host/name. "
        "Default: an SQLite file in --data-dir.",
        "session_timeout": "Seconds without a sign of life until a client's adapters are freed.",
        "snapshot_seconds": "Least time between two snapshots of an adapter; 0 takes one after every step. "
        "What was done since the last one is run again after a crash.",
        "drain_seconds": "Seconds for unfinished work after SIGTERM; what is left goes on at the next start.",
    },
    "Hosts": {
        "worker_host": "Address where workers connect; other hosts need one that they can reach, or 0.0.0.0.",
        "worker_port": "TCP port where workers connect; 0 takes a free one.",
        "jax_port": "TCP port on the host of worker 0 where the other workers find JAX's own service, which "
        "asks nobody who they are; 0 takes a free one.",
        "secret_file": "File with the secret that all hosts share. Default: SPMD_TX_SECRET, or, when all "
        "processes are on this host, a new one.",
        "local_processes": "Worker processes to start on this host, from number 0; the others join by "
        "spmd-tx worker. Default: all.",
        "command_timeout": "Seconds that one step, or the compilation of one program, may take until "
        "workers are restarted.",
    },
    "Storage": {
        "min_free_disk": "Room that must be free on the disk of --data-dir for new work to be taken, as 1GiB "
        "or 5%.",
        "keep_results_hours": "Hours until a result can no longer be fetched; at least --session-timeout.",
        "keep_versions_hours": "Hours until an unnamed sampler version goes that nobody uses, if there is a "
        "newer one.",
        "keep_audit_days": "Days until an entry of the audit log goes.",
        "max_compilation_cache": "Most bytes of compiled programs in --data-dir, as 10GiB.",
        "max_checkpoint_cache": "Most bytes of local copies of checkpoints that are kept at a URL, as 50GiB.",
    },
    "Advanced": {
        "warm_up": "Whether workers compile the programs for requests of all sizes ahead, while they serve "
        "others; off compiles each one when it is wanted for the first time.",
        "train_tokens": "Most tokens of a training micro-batch, per data shard; 0 takes as many as fit and "
        "are of use. A single sequence may be longer.",
        "sampler_slots": "Saved versions of adapters that are on the device at once, for sampling.",
        "decode_rows": "Sequences that are sampled at once, per data shard; fewer if memory forbids it.",
        "decode_steps": "Tokens sampled per sequence before new sequences can join.",
        "page_size": "Tokens per page of the key-value cache.",
        "kv_cache_tokens": "Tokens in the key-value cache, per data shard; 0 takes what memory is left.",
    },
}

LIMITS = "limits"  # the table of a TOML file

DEFAULTS = ServerConfig(base_model="")


def environment_variable(name: str) -> str:
    return f"SPMD_TX_{name.upper()}"


# For commands that look at the data of a server
DataDir = Annotated[Path, typer.Option(envvar="SPMD_TX_DATA_DIR", show_envvar=False)]
DatabaseUrl = Annotated[str | None, typer.Option(envvar="SPMD_TX_DATABASE_URL", show_envvar=False)]


def server_options() -> inspect.Signature:
    """The fields of ServerConfig, ``--config`` and ``--limit``, as typer wants to see them."""
    types = typing.get_type_hints(ServerConfig)
    defaults = {
        field.name: ... if field.required else field.default for field in msgspec.structs.fields(ServerConfig)
    }
    config_option = typer.Option(
        envvar=environment_variable("config"),
        show_envvar=False,
        help="TOML file with any of the options below, as base_model = '...'. "
        "The command line and the environment override it.",
        callback=use_toml_file,
        is_eager=True,
    )
    parameters = [_keyword("config", Annotated[Path | None, config_option], None)]
    for panel, options in HELP.items():
        for name, text in options.items():
            option = typer.Option(
                rich_help_panel=panel,
                help=text,
                envvar=environment_variable(name),
                show_envvar=False,
                show_default=defaults[name] is not None,
            )
            parameters.append(_keyword(name, Annotated[types[name], option], defaults[name]))
    limit_option = typer.Option(
        rich_help_panel="Bounds on clients",
        metavar="NAME=VALUE",
        envvar=environment_variable("limit"),
        show_envvar=False,
        show_default=False,
        help="Changes a bound on what clients may ask for, as --limit stop_strings=128; can be given "
        "again for others. docs/limits.md lists them with their defaults. In the environment commas are "
        "between them; in the file of --config they are a table called limits.",
        callback=gather_limits,
    )
    parameters.append(_keyword("limit", Annotated[list[str], limit_option], []))
    return inspect.Signature(parameters)


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    if default is ...:
        default = inspect.Parameter.empty
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def use_toml_file(context: typer.Context, config: Path | None) -> None:
    """Make the file's values the defaults of the options that are read after this one."""
    if config is not None:
        values = read_toml(config)
        context.meta[LIMITS] = values.pop(LIMITS, {})
        context.default_map = values


def gather_limits(context: typer.Context, limit: list[str]) -> list[str]:
    """The pairs of all three sources, of the nearest one last."""
    of_file = [f"{name}={value}" for name, value in context.meta.get(LIMITS, {}).items()]
    return [*of_file, os.environ.get(environment_variable("limit"), ""), *limit]


def read_limits(limit: list[str]) -> Bounds:
    """The bounds that pairs with commas between them set. A later one overrides an earlier one."""
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
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise StartError(f"cannot read --config {path}: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise StartError(f"{path} is not valid TOML: {error}") from None
    known = [LIMITS if name == "bounds" else name for name in ServerConfig.__struct_fields__]
    unknown = sorted(values.keys() - set(known))
    if unknown:
        raise StartError(f"{path} sets {', '.join(unknown)}; valid keys are {', '.join(known)}")
    if not isinstance(values.get(LIMITS, {}), dict):
        raise StartError(
            f"{path} sets limits to a {type(values[LIMITS]).__name__}; make it a table, [limits]"
        )
    return values
