"""The server's settings. They are read once, at the start; only the command line fills them."""

import math
from pathlib import Path
from typing import Literal

import msgspec

from spmd_tx.bounds import Bounds
from spmd_tx.byte_sizes import parse_size
from spmd_tx.errors import StartError
from spmd_tx.protocol.addresses import HIGHEST_PORT

MANY = 2**31 - 1  # the most that a number can be; of seconds these are 68 years
MOST = {"port": HIGHEST_PORT, "worker_port": HIGHEST_PORT, "jax_port": HIGHEST_PORT}  # of others, MANY
MAY_BE_ZERO = (
    "kv_cache_tokens",
    "train_tokens",
    "port",
    "worker_port",
    "jax_port",
    "local_processes",
    "drain_seconds",
    "snapshot_seconds",
    "keep_results_hours",
    "keep_versions_hours",
)
PARALLEL_SIZES = (
    "fully_sharded_data_parallel_size",
    "expert_parallel_size",
    "tensor_parallel_size",
)
PLAN_OPTIONS = (  # beside the model: what the memory plan depends on
    "dtype",
    "expert_weights",
    "base_dtype",
    "max_context_length",
    *PARALLEL_SIZES,
    "shard_base_weights",
    "num_processes",
    "full_parameters",
    "max_lora_adapters",
    "max_lora_rank",
    "expert_lora",
    "train_tokens",
    "sampler_slots",
    "decode_rows",
    "decode_steps",
    "page_size",
    "kv_cache_tokens",
    "state_cache",
)
AUTO = "auto"
LogFormat = Literal["text", "json"]
Size = int | Literal["auto"]  # auto: chosen when it is known which devices there are
SIZES = ("min_free_disk", "max_compilation_cache", "max_checkpoint_cache", "state_cache")


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Holds all options of ``spmd-tx serve``, by their long names. Impossible values raise StartError."""

    base_model: str  # Hugging Face id or directory
    revision: str | None = None  # of a Hugging Face id; None: main
    served_model_name: str | None = None  # what clients call it, by commas; None: as in base_model
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    # Whether devices keep a mixture's experts as an MXFP4, FP8 or INT4 checkpoint has them.
    expert_weights: Literal["unpacked", "packed"] = "unpacked"
    # In what devices keep the matrices that adapters are added to; auto: as the checkpoint has them.
    base_dtype: Literal["auto", "int8", "fp8", "int4"] = "auto"
    max_context_length: int | None = None  # tokens; None: the model's own limit

    fully_sharded_data_parallel_size: Size = AUTO
    expert_parallel_size: Size = AUTO
    tensor_parallel_size: Size = AUTO
    shard_base_weights: Literal["auto", "yes", "no"] = "auto"  # over fsdp; auto: if they are too large
    num_processes: int = 1

    full_parameters: bool = False  # whether all weights are trained, of one model at a time, and no adapters
    max_lora_adapters: int = 8
    max_lora_rank: int = 32
    # Whether all experts of a mixture share the factor that touches the model width; auto: as in data_dir, or
    # else that they do.
    expert_lora: Literal["auto", "shared-outer", "per-expert"] = "auto"

    host: str = "127.0.0.1"
    port: int = 8000
    trusted_proxies: str = "127.0.0.1,::1"  # addresses and networks whose X-Forwarded-* headers are believed
    log_format: LogFormat = "text"
    insecure_no_auth: bool = False  # whether a server without API keys may listen on more than loopback
    data_dir: Path = Path("spmd-tx-data")
    checkpoints_base: str | None = None  # directory or fsspec URL; None: in data_dir
    database_url: str | None = None  # None: SQLite in data_dir
    session_timeout: float = 1800.0  # seconds without a heartbeat until a session's adapters are freed
    snapshot_seconds: float = 60.0  # between two snapshots of a model, at least
    drain_seconds: float = 30.0  # for unfinished work, when the server is to end

    worker_host: str = "127.0.0.1"
    worker_port: int = 0
    jax_port: int = 0
    secret_file: Path | None = None  # None: SPMD_TX_SECRET, or a secret of this run
    local_processes: int | None = None  # None: all
    command_timeout: float = 600.0  # seconds

    min_free_disk: str = "1GiB"  # bytes or a share; below it no new work is taken
    keep_results_hours: float = 2.0  # after a request is finished
    keep_versions_hours: float = 2.0  # after the last use of a superseded sampler version
    keep_audit_days: float = 90.0
    keep_metrics_days: float = 180.0
    max_compilation_cache: str = "10GiB"
    max_checkpoint_cache: str = "50GiB"  # of checkpoints that are elsewhere

    warm_up: Literal["background", "off"] = "background"  # whether programs are compiled ahead of need
    train_tokens: int = 0  # most of a training micro-batch, per data shard; 0: as many as fit and are useful
    sampler_slots: int = 8  # saved versions on the device at once
    decode_rows: int = 128  # sequences drawn at once, per data shard; fewer if memory does not allow them
    decode_steps: int = 16  # tokens drawn per row and dispatch
    page_size: int = 16  # tokens
    batch_invariant: bool = False  # whether samples are the same to the last bit in any company
    kv_cache_tokens: int = 0  # per data shard; 0: as many as fit
    state_cache: str = AUTO  # of each device, for the states of prompts; auto: one for each row of a Decode

    bounds: Bounds = Bounds()  # on what clients may ask for

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            least, most = 0 if name in MAY_BE_ZERO else 1, MOST.get(name, MANY)
            if name in PARALLEL_SIZES and isinstance(value, str) and value != AUTO:
                option = "--" + name.replace("_", "-")
                raise StartError(f"{option} is {value!r}; it must be a number, or {AUTO}")
            if isinstance(value, int | float) and not isinstance(value, bool):
                option = "--" + name.replace("_", "-")
                check_number(option, value, least, most)
            if name in SIZES and isinstance(value, str) and (name, value) != ("state_cache", AUTO):
                _check_size(name, value)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names by which clients ask for the model; the first one is that of answers."""
        names = tuple(name.strip() for name in (self.served_model_name or "").split(",") if name.strip())
        return names or (self.base_model,)

    @property
    def model_name(self) -> str:
        return self.model_names[0]

    @property
    def parallel_sizes(self) -> tuple[Size, Size, Size]:
        """The sizes of the mesh: fsdp, ep and tp."""
        return (
            self.fully_sharded_data_parallel_size,
            self.expert_parallel_size,
            self.tensor_parallel_size,
        )

    @property
    def mesh(self) -> tuple[int, int, int] | None:
        """The sizes of the mesh; None while any of them has still to be chosen."""
        fsdp, ep, tp = self.parallel_sizes
        return None if fsdp == AUTO or ep == AUTO or tp == AUTO else (fsdp, ep, tp)

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
        return ", ".join(f"--{name.replace('_', '-')} {size}" for name, size in sizes if size != AUTO)

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
    def checkpoints_dir(self) -> Path:
        """Where workers write checkpoints, and where local copies of remote ones are kept."""
        if self.checkpoints_base is None or "://" in self.checkpoints_base:
            return self.data_dir / "checkpoints"
        return Path(self.checkpoints_base).absolute()


def check_number(option: str, value: float, least: float, most: float = MANY) -> None:
    """Raise StartError unless an option's value is a number in this range."""
    if value < least:
        raise StartError(f"{option} is {value}; it must be at least {least}")
    if not value <= most:  # true of what is no number, too
        raise StartError(f"{option} is {value}; it must be from {least} to {most}")


def _check_size(name: str, text: str) -> None:
    try:
        parse_size(text, whole=0)
    except ValueError as error:
        raise StartError(f"--{name.replace('_', '-')} is wrong: {error}") from None
