"""Reads options: the command line overrides the environment, then come the TOML file and the defaults."""

import inspect
import os
import tomllib
import typing
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from spmd_tx.bounds import Bounds, bounds_of
from spmd_tx.config import AUTO, PARALLEL_SIZES, ServerConfig
from spmd_tx.errors import StartError

# The help for every field of ServerConfig, by the panel of --help that shows it.
HELP = {
    "Model": {
        "base_model": "Hugging Face ID or directory of the frozen base model.",
        "revision": "Branch, tag or commit of a model of the Hugging Face Hub; a full commit hash never "
        "changes. Default: main, as it was when the model was downloaded.",
        "served_model_name": "Name of the model for clients, or several names separated by commas; answers "
        "use the first one. Default: the value of --base-model.",
        "dtype": "Type of the base weights and of the arithmetic; auto is float32 on CPUs, else bfloat16.",
        "expert_weights": "packed keeps a mixture's experts on the devices as the checkpoint stores them, in "
        "MXFP4, FP8 or INT4. They take a half to a quarter of the memory, and are decoded in every step, "
        "which makes steps somewhat slower. unpacked decodes them once, while they are loaded.",
        "base_dtype": "Type of the frozen matrices that adapters are added to, on the devices: int8, fp8 or "
        "int4, with a scale for every 32 or 64 numbers. They are rounded while they are loaded, for training "
        "and sampling alike. They take a half to a quarter of the memory, and are decoded in every step, "
        "which makes steps somewhat slower. Adapters stay in full precision.",
        "max_context_length": "Maximum tokens of a prompt and its answer. Default: the model's own limit.",
    },
    "Mesh": {
        "fully_sharded_data_parallel_size": "Number of ways to split rows, adapters and optimizer state. "
        "The product of this and the next two sizes is the number of devices; sizes that are auto are chosen "
        "so that all devices are used, as spmd-tx plan does.",
        "expert_parallel_size": "Further ways to split rows; the experts of a mixture are split over them.",
        "tensor_parallel_size": "Number of ways to split the base weights and every matrix product.",
        "shard_base_weights": "Whether the first of these sizes splits the base weights, too; auto does so "
        "if they would take more than half of a device's memory.",
        "num_processes": "Number of worker processes; each takes an equal part of the devices.",
    },
    "Adapters": {
        "full_parameters": "Train all weights of the base model instead of LoRA adapters, one model at a "
        "time. Clients ask for it with rank 0, and wait until the session of the model in training has "
        "ended. Other options of adapters, and --sampler-slots, then have no effect.",
        "max_lora_adapters": "LoRA adapters that are on the device at once, for training. Any number of "
        "others wait in host memory or on disk.",
        "max_lora_rank": "Largest LoRA rank that a client may ask for.",
        "expert_lora": "Factors of a mixture's experts: shared-outer ones share the factor that touches the "
        "model width, as with hosted Tinker; per-expert ones share nothing, at a rank divided by the experts "
        "per token. auto is what the data directory has, otherwise shared-outer.",
    },
    "Server": {
        "host": "Address to listen on; 0.0.0.0 is every IPv4 address of this machine, :: every IPv6 address.",
        "port": "TCP port to listen on; 0 picks a free one.",
        "log_format": "Format of the log on standard error: text, or json with one object per line for log "
        "collectors.",
        "insecure_no_auth": "Listen on --host even though there are no API keys: everyone who can reach the "
        "port has access to everything. Has no effect once there are keys.",
        "trusted_proxies": "Addresses and networks, such as 10.0.0.0/8, of reverse proxies whose "
        "X-Forwarded-Proto, -Host and -Prefix give the server's address as clients see it.",
        "data_dir": "Directory where requests, results and checkpoints are kept.",
        "checkpoints_base": "Where named checkpoints are kept: a directory that all hosts see, or an "
        "fsspec URL such as s3://bucket/path or gs://bucket/path. Default: in --data-dir.",
        "database_url": "SQLAlchemy URL, such as postgresql+asyncpg://user@host/name. "
        "Default: an SQLite file in --data-dir.",
        "session_timeout": "Seconds without a heartbeat until a client's adapters are freed.",
        "snapshot_seconds": "Minimum seconds between two snapshots of an adapter; 0 takes one after every "
        "step. Steps since the last snapshot are run again after a crash.",
        "drain_seconds": "Seconds to finish work after SIGTERM; the rest continues at the next start.",
    },
    "Hosts": {
        "worker_host": "Address to listen on for workers; other hosts need one that they reach, or :: for "
        "all of IPv4 and IPv6, or 0.0.0.0 for all of IPv4.",
        "worker_port": "TCP port to listen on for workers; 0 picks a free one.",
        "jax_port": "TCP port on the host of worker 0 for JAX's coordination service, which has no "
        "authentication; 0 picks a free one.",
        "secret_file": "File with the secret that all hosts share. Default: SPMD_TX_SECRET, or a new "
        "secret if all processes are on this host.",
        "local_processes": "Worker processes to start on this host, from number 0; the others join with "
        "spmd-tx worker. Default: all.",
        "command_timeout": "Seconds that one step, or the compilation of one program, may take before the "
        "workers are restarted.",
    },
    "Storage": {
        "min_free_disk": "Space that must be free on the disk of --data-dir for new work to be accepted, "
        "such as 1GiB or 5%.",
        "keep_results_hours": "Hours until a result can no longer be fetched; at least --session-timeout.",
        "keep_versions_hours": "Hours until an unnamed sampler version that nobody uses is deleted, if there "
        "is a newer one.",
        "keep_audit_days": "Days until an entry of the audit log is deleted.",
        "keep_metrics_days": "Days after its last step until the metrics of a run are deleted. After a week "
        "about a thousand of its steps are left.",
        "max_compilation_cache": "Maximum size of the compiled programs in --data-dir, such as 10GiB.",
        "max_checkpoint_cache": "Maximum size of local copies of checkpoints that are kept at a URL, such as "
        "50GiB.",
    },
    "Advanced": {
        "warm_up": "Whether workers compile the programs for requests of all sizes ahead of time, while "
        "they serve; off compiles each program when it is first needed.",
        "train_tokens": "Maximum tokens of a training micro-batch, per data shard; 0 takes as many as fit "
        "and are useful. A single sequence may be longer.",
        "sampler_slots": "Saved versions of adapters that are on the device at once, for sampling.",
        "decode_rows": "Sequences that are sampled at once, per data shard; fewer if memory is short.",
        "decode_steps": "Tokens sampled per sequence before new sequences can join.",
        "page_size": "Tokens per page of the key-value cache.",
        "batch_invariant": "Make samples and their log-probabilities independent, to the last bit, of other "
        "requests, cached prompts and restarts; sampling is slower.",
        "kv_cache_tokens": "Tokens in the key-value cache, per data shard; 0 uses the memory that is left.",
        "state_cache": "Memory of each device for states of cached prompts, such as 4GiB, of models whose "
        "layers keep states (Qwen3.5, gpt-oss); auto keeps as many as --decode-rows.",
    },
}

LIMITS = "limits"  # the table in a TOML file

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


def parse_parallel_size(value: int | str) -> int | str:
    """Read a size of the mesh: a number, or "auto"."""
    if value == AUTO:
        return AUTO
    try:
        return int(value)
    except ValueError:
        raise typer.BadParameter(f"{value!r} is neither a number nor {AUTO}") from None


def server_options() -> inspect.Signature:
    """Return the signature that typer reads: the fields of ServerConfig, ``--config`` and ``--limit``."""
    types = typing.get_type_hints(ServerConfig)
    defaults = {
        field.name: ... if field.required else field.default for field in msgspec.structs.fields(ServerConfig)
    }
    config_option = typer.Option(
        envvar=environment_variable("config"),
        show_envvar=False,
        help="TOML file with any of the options below, such as base_model = '...'. "
        "The command line and the environment override it.",
        callback=use_toml_file,
        is_eager=True,
    )
    parameters = [_keyword("config", Annotated[Path | None, config_option], None)]
    for panel, options in HELP.items():
        for name, text in options.items():
            is_size = name in PARALLEL_SIZES
            option = typer.Option(
                rich_help_panel=panel,
                parser=parse_parallel_size if is_size else None,
                metavar="NUMBER" if is_size else None,
                help=text,
                envvar=environment_variable(name),
                show_envvar=False,
                show_default=defaults[name] is not None,
            )
            kind = str if is_size else types[name]
            parameters.append(_keyword(name, Annotated[kind, option], defaults[name]))
    limit_option = typer.Option(
        rich_help_panel="Bounds on clients",
        metavar="NAME=VALUE",
        envvar=environment_variable("limit"),
        show_envvar=False,
        show_default=False,
        help="Change a bound on what clients may ask for, as in --limit stop_strings=128; can be repeated. "
        "docs/limits.md lists all bounds with their defaults. In the environment, separate them by commas; "
        "in the file of --config, put them into a table called limits.",
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
    """Collect the pairs of file, environment and command line, in this order."""
    of_file = [f"{name}={value}" for name, value in context.meta.get(LIMITS, {}).items()]
    return [*of_file, os.environ.get(environment_variable("limit"), ""), *limit]


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
    known = [LIMITS if name == "bounds" else name for name in ServerConfig.__struct_fields__]
    unknown = sorted(values.keys() - set(known))
    if unknown:
        raise StartError(f"{path} sets {', '.join(unknown)}; valid keys are {', '.join(known)}")
    if not isinstance(values.get(LIMITS, {}), dict):
        raise StartError(
            f"{path} sets limits to a {type(values[LIMITS]).__name__}; make it a table, [limits]"
        )
    return values
