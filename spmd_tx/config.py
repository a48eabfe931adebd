"""The server's settings. They are read once, at the start; only the command line fills them."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from spmd_tx.bounds import Bounds
from spmd_tx.group_names import MAIN, folder_of, template_of
from spmd_tx.options import (
    AUTO,
    FROM_ZERO,
    GC,
    PLAN,
    WORKER,
    ByteSize,
    Heading,
    NumberOrAuto,
    Port,
    declared,
    flag,
)
from spmd_tx.protocol.setup import WorkerRole
from spmd_tx.sampling_options import SamplingOptions

PARALLEL_SIZES = ("fully_sharded_data_parallel_size", "expert_parallel_size", "tensor_parallel_size")
LogFormat = Literal["text", "json"]


class ServerConfig(SamplingOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds all options of ``spmd-tx serve``, by their long names. Impossible values raise StartError.

    Each has its help, in the order of ``--help``, where those of sampling come last. Numbers are at least 1
    unless a mark says otherwise.
    """

    base_model: Annotated[
        str, Heading("Model"), "Hugging Face ID or directory of the frozen base model.", PLAN
    ]
    revision: Annotated[
        str | None,
        "Branch, tag or commit of a model of the Hugging Face Hub; a full commit hash never changes. "
        "Default: main, as it was when the model was downloaded.",
        PLAN,
    ] = None
    served_model_name: Annotated[
        str | None,
        "Name of the model for clients, or several names separated by commas; answers use the first one. "
        "Default: the value of --base-model.",
    ] = None
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"],
        "Type of the base weights and of the arithmetic; auto is float32 on CPUs, else bfloat16.",
        PLAN,
    ] = "auto"
    expert_weights: Annotated[
        Literal["unpacked", "packed"],
        "packed keeps a mixture's experts on the devices as the checkpoint stores them, in MXFP4, FP8 or "
        "INT4. They take a half to a quarter of the memory, and are decoded in every step, which makes steps "
        "somewhat slower. unpacked decodes them once, while they are loaded.",
        PLAN,
    ] = "unpacked"
    base_dtype: Annotated[
        Literal["auto", "int8", "fp8", "int4"],
        "Type of the frozen matrices that adapters are added to, on the devices: int8, fp8 or int4, with a "
        "scale for every 32 or 64 numbers. They are rounded while they are loaded, for training and sampling "
        "alike. They take a half to a quarter of the memory, and are decoded in every step, which makes "
        "steps somewhat slower. Adapters stay in full precision.",
        PLAN,
    ] = "auto"
    max_context_length: Annotated[
        int | None, "Maximum tokens of a prompt and its answer. Default: the model's own limit.", PLAN
    ] = None
    role: Annotated[
        WorkerRole,
        "What the devices are for: train trains and samples; sample only samples, so that all memory which "
        "training would take is for the key-value cache. Models that were trained before wait until the "
        "server trains again, and their saved versions can be sampled from. Options of training then have "
        "no effect.",
        PLAN,
    ] = "train"

    fully_sharded_data_parallel_size: Annotated[
        NumberOrAuto,
        Heading("Mesh"),
        "Number of ways to split rows, adapters and optimizer state. The product of this and the next two "
        "sizes is the number of devices; sizes that are auto are chosen so that all devices are used, as "
        "spmd-tx plan does.",
        PLAN,
    ] = AUTO
    expert_parallel_size: Annotated[
        NumberOrAuto, "Further ways to split rows; the experts of a mixture are split over them.", PLAN
    ] = AUTO
    tensor_parallel_size: Annotated[
        NumberOrAuto, "Number of ways to split the base weights and every matrix product.", PLAN
    ] = AUTO
    shard_base_weights: Annotated[
        Literal["auto", "yes", "no"],
        "Whether the first of these sizes splits the base weights, too; auto does so if they would take more "
        "than half of a device's memory.",
        PLAN,
    ] = "auto"
    num_processes: Annotated[int, "Worker processes; each takes an equal part of the devices.", PLAN] = 1

    full_parameters: Annotated[
        bool,
        Heading("Adapters"),
        "Train all weights of the base model instead of LoRA adapters, one model at a time. Clients ask for "
        "it with rank 0, and wait until the session of the model in training has ended. Other options of "
        "adapters, and --sampler-slots, then have no effect.",
        PLAN,
    ] = False
    max_lora_adapters: Annotated[
        NumberOrAuto,
        "LoRA adapters that are on the device at once, for training. Any number of others wait in host "
        "memory or on disk. auto: 8, or as many of 4, 2 and 1 as there is room for.",
        PLAN,
    ] = AUTO
    max_lora_rank: Annotated[int, "Largest LoRA rank that a client may ask for.", PLAN] = 32
    expert_lora: Annotated[
        Literal["auto", "shared-outer", "per-expert"],
        "Factors of a mixture's experts: shared-outer ones share the factor that touches the model width, as "
        "with hosted Tinker; per-expert ones share nothing, at a rank divided by the experts per token. auto "
        "is what the data directory has, otherwise shared-outer.",
        PLAN,
    ] = "auto"

    host: Annotated[
        str,
        Heading("Server"),
        "Address to listen on; 0.0.0.0 is every IPv4 address of this machine, :: every IPv6 address.",
    ] = "127.0.0.1"
    port: Annotated[Port, "TCP port to listen on; 0 picks a free one."] = 8000
    log_format: Annotated[
        LogFormat,
        "Format of the log on standard error: text, or json with one object per line for log collectors.",
        WORKER,
    ] = "text"
    insecure_no_auth: Annotated[
        bool,
        "Listen on --host even though there are no API keys: everyone who can reach the port has access to "
        "everything. Has no effect once there are keys.",
    ] = False
    trusted_proxies: Annotated[
        str,
        "Addresses and networks, such as 10.0.0.0/8, of reverse proxies whose X-Forwarded-Proto, -Host and "
        "-Prefix give the server's address as clients see it.",
    ] = "127.0.0.1,::1"
    tls_cert: Annotated[
        Path | None,
        "PEM file with this server's certificate, and those behind it, to encrypt clients' connections.",
    ] = None
    tls_key: Annotated[
        Path | None,
        "PEM file with the key of --tls-cert, without a password. Default: it is in that file, too.",
    ] = None
    data_dir: Annotated[Path, "Directory where requests, results and checkpoints are kept."] = Path(
        "spmd-tx-data"
    )
    checkpoints_base: Annotated[
        str | None,
        "Where named checkpoints are kept: a directory that all hosts see, or an fsspec URL such as "
        "s3://bucket/path or gs://bucket/path. Default: in --data-dir.",
    ] = None
    database_url: Annotated[
        str | None,
        "SQLAlchemy URL, such as postgresql+asyncpg://user@host/name. Default: an SQLite file in --data-dir.",
    ] = None
    session_timeout: Annotated[
        float, "Seconds without a heartbeat until a client's adapters are freed.", GC
    ] = 1800.0
    snapshot_seconds: Annotated[
        float,
        FROM_ZERO,
        "Minimum seconds between two snapshots of an adapter; 0 takes one after every step. Steps since the "
        "last snapshot are run again after a crash.",
    ] = 60.0
    drain_seconds: Annotated[
        float, FROM_ZERO, "Seconds to finish work after SIGTERM; the rest continues at the next start."
    ] = 30.0

    worker_host: Annotated[
        str,
        Heading("Hosts"),
        "Address to listen on for workers; other hosts need one that they reach, or :: for all of IPv4 and "
        "IPv6, or 0.0.0.0 for all of IPv4.",
    ] = "127.0.0.1"
    worker_port: Annotated[Port, "TCP port to listen on for workers; 0 picks a free one."] = 0
    jax_port: Annotated[
        Port,
        "TCP port on the host of worker 0 for JAX's coordination service, which has no authentication; 0 "
        "picks a free one.",
    ] = 0
    secret_file: Annotated[
        Path | None,
        "File with the secret that all hosts share. Default: SPMD_TX_SECRET, or a new secret if all "
        "processes are on this host.",
    ] = None
    local_processes: Annotated[
        int | None,
        FROM_ZERO,
        "Worker processes to start on this host, from number 0; the others join with spmd-tx worker. "
        "Default: all.",
    ] = None
    worker_devices: Annotated[
        int | None,
        "Devices of each worker process, where groups or other programs share those of a host. Default: all, "
        "in equal parts.",
    ] = None
    command_timeout: Annotated[
        float,
        "Seconds that one step, or the compilation of one program, may take before the workers are "
        "restarted.",
    ] = 600.0

    min_free_disk: Annotated[
        ByteSize,
        Heading("Storage"),
        "Space that must be free on the disk of --data-dir for new work to be accepted, such as 1GiB or 5%.",
    ] = "1GiB"
    keep_results_hours: Annotated[
        float, FROM_ZERO, "Hours until a result can no longer be fetched; at least --session-timeout.", GC
    ] = 2.0
    keep_versions_hours: Annotated[
        float,
        FROM_ZERO,
        "Hours until an unnamed sampler version that nobody uses is deleted, if there is a newer one.",
        GC,
    ] = 2.0
    keep_audit_days: Annotated[float, "Days until an entry of the audit log is deleted.", GC] = 90.0
    keep_metrics_days: Annotated[
        float,
        "Days after its last step until the metrics of a run are deleted. After a week about a thousand of "
        "its steps are left.",
        GC,
    ] = 180.0
    max_compilation_cache: Annotated[
        ByteSize, "Maximum size of the compiled programs in --data-dir, such as 10GiB.", GC
    ] = "10GiB"
    max_checkpoint_cache: Annotated[
        ByteSize, "Maximum size of local copies of checkpoints that are kept at a URL, such as 50GiB."
    ] = "50GiB"

    warm_up: Annotated[
        Literal["background", "off"],
        Heading("Advanced"),
        "Whether workers compile the programs for requests of all sizes ahead of time, while they serve; off "
        "compiles each program when it is first needed.",
    ] = "background"
    train_tokens: Annotated[
        int,
        FROM_ZERO,
        "Maximum tokens of a training micro-batch, per data shard; 0 takes as many as fit and are useful. A "
        "single sequence may be longer.",
        PLAN,
    ] = 0
    image_tokens: Annotated[
        NumberOrAuto,
        FROM_ZERO,
        "Tokens of images that devices hold, of models that see; auto: of a micro-batch; 0 takes text alone.",
        PLAN,
    ] = AUTO

    bounds: Bounds = Bounds()  # on what clients may ask for
    group: str = MAIN  # which group of workers these are the options of
    groups: tuple["ServerConfig", ...] = ()  # of the groups beside the main one
    processes_beside: tuple[int, ...] = ()  # workers of each other group, which may share a host's memory

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(ServerConfig):
            value = getattr(self, field.name)
            if field.name in OPTIONS and value != field.default:
                OPTIONS[field.name].accepts.check(flag(field.name), value)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names by which clients ask for the model; the first one is that of answers."""
        names = tuple(name.strip() for name in (self.served_model_name or "").split(",") if name.strip())
        return names or (self.base_model,)

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    @property
    def parallel_sizes(self) -> tuple[NumberOrAuto, NumberOrAuto, NumberOrAuto]:
        """The sizes of the mesh: fsdp, ep and tp."""
        return (self.fully_sharded_data_parallel_size, self.expert_parallel_size, self.tensor_parallel_size)

    @property
    def mesh(self) -> tuple[int, int, int] | None:
        """The sizes of the mesh; None while any of them has still to be chosen."""
        fsdp, ep, tp = self.parallel_sizes
        return None if fsdp == AUTO or ep == AUTO or tp == AUTO else (fsdp, ep, tp)

    @property
    def trains(self) -> bool:
        """Whether models are trained, and not only sampled from."""
        return self.role == "train"

    @property
    def max_rank(self) -> int:
        """The largest rank of adapters; 0: all weights are trained."""
        return 0 if self.full_parameters else self.max_lora_rank

    @property
    def planned_expert_lora(self) -> str:
        """The layout of adapters of experts in a new data directory."""
        return "shared-outer" if self.expert_lora == AUTO else self.expert_lora

    @property
    def sizes_as_options(self) -> str:
        """The sizes of the mesh that are given, as options of the command line."""
        sizes = zip(PARALLEL_SIZES, self.parallel_sizes, strict=True)
        return ", ".join(f"{flag(name)} {size}" for name, size in sizes if size != AUTO)

    @property
    def given_devices(self) -> int:
        """The product of the sizes of the mesh that are given."""
        return math.prod(size for size in self.parallel_sizes if size != AUTO)

    @property
    def data_shards(self) -> int:
        """Into how many parts rows are split."""
        fsdp, ep, _ = self._known_mesh
        return fsdp * ep

    @property
    def expert_shards(self) -> int:
        """How many data shards each have a part of the experts."""
        return self._known_mesh[1]

    @property
    def mesh_size(self) -> int:
        return math.prod(self._known_mesh)

    @property
    def devices_per_process(self) -> int:
        return self.mesh_size // self.num_processes

    @property
    def _known_mesh(self) -> tuple[int, int, int]:
        assert self.mesh is not None, "the mesh has not been chosen yet"
        return self.mesh

    def with_mesh(self, mesh: tuple[int, int, int]) -> "ServerConfig":
        return msgspec.structs.replace(self, **dict(zip(PARALLEL_SIZES, mesh, strict=True)))

    @property
    def agents_here(self) -> int:
        """How many worker processes, from number 0, the server starts on its own host."""
        return self.num_processes if self.local_processes is None else self.local_processes

    @property
    def all_groups(self) -> tuple["ServerConfig", ...]:
        """The options of each group; the first one's are these."""
        return (self, *self.groups)

    @property
    def host_processes(self) -> int:
        """How many workers of all groups may share the memory of a host."""
        return self.num_processes + sum(self.processes_beside)

    @property
    def group_dir(self) -> Path:
        """Where the group keeps what is its own."""
        return folder_of(self.data_dir, self.group)

    @property
    def template_dir(self) -> Path:
        """Where the replicas of a group keep what they share."""
        return folder_of(self.data_dir, template_of(self.group))

    @property
    def checkpoints_dir(self) -> Path:
        """Where workers write checkpoints, and where local copies of remote ones are kept."""
        if self.checkpoints_base is None or "://" in self.checkpoints_base:
            return self.data_dir / "checkpoints"
        return Path(self.checkpoints_base).absolute()


OPTIONS = dict(declared(ServerConfig))


def options_of(command: str) -> list[str]:
    """Return the names of the options that a command takes."""
    return [name for name, option in OPTIONS.items() if command in option.commands]


def as_words(config: ServerConfig, command: str) -> Iterator[str]:
    """Yield the words that give a command the options it takes, but for those that have their defaults."""
    defaults = ServerConfig(base_model="")
    for name in options_of(command):
        value = getattr(config, name)
        if value != getattr(defaults, name):
            yield from [flag(name)] if value is True else [flag(name), str(value)]
