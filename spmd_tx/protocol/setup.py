"""What a worker must know before its first command."""

from typing import Literal

import msgspec

from spmd_tx.protocol.kernels import Kernels

WorkerRole = Literal["train", "sample"]  # of workers: those that train sample, too

SHORTEST_ROW = 64  # tokens
ROW_STEP = 1024  # tokens: kernels and parts of rows divide it


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag="setup"):
    """Answers Hello with all that a worker must know before its first command."""

    generation: int
    num_processes: int
    host_processes: int = 0  # that may share a host's memory with this one, of all groups; 0: these
    jax_coordinator: str  # host:port of jax.distributed's service, hosted by process 0
    jax_port: int = 0  # this port; 0: the free port that process 0 has reported
    model_dir: str  # Hugging Face layout
    model_name: str = ""  # what exported adapters name as their base model
    dtype: str  # "bfloat16", "float32" or "auto": float32 on CPU, else bfloat16
    fsdp: int
    ep: int
    tp: int
    role: WorkerRole = "train"
    adapter_slots: int  # training slots, numbered from 0; 0 where nothing is trained
    may_have_fewer_slots: bool = False  # for training, if so many do not fit: by halves, and at least one
    bank_slots: int  # sampler bank slots; slot 0 is the base model and never written
    max_rank: int
    # How many copies of the whole model samplers draw from, with the base model itself; 0: adapters are
    # trained. Otherwise all weights are, and bank slots of commands number the copies.
    full_copies: int = 0
    expert_lora: str = "shared-outer"  # the layout of factors of experts (models/declared/model.py)
    expert_weights: str = "unpacked"  # "packed": as the checkpoint encodes them (models/checkpoint/packed.py)
    base_dtype: str = "auto"  # in which adapted maps are kept, of BASE_DTYPES in models/declared/encoding.py
    speculation: str = "off"  # "mtp": models make drafts themselves (models/mtp.py)
    max_context: int  # tokens
    page_size: int  # tokens
    kv_cache_tokens: int  # per data shard; 0: as many as fit
    state_cache_bytes: int | None = None  # of each device, for states of prefixes; None: one per decode row
    decode_rows: int  # maximum of one Decode, per data shard; fewer if memory does not allow them
    decode_steps: int  # maximum of one Decode
    compilation_cache: str  # directory
    idle_adapters: str  # directory for what is idle and host memory has no room for
    kernel_choices: str = ""  # directory for the choices of kernels that GPUs have made; "": nowhere
    kernels: Kernels = Kernels()  # those of CPUs; workers put in what they choose for their devices
    shard_base_weights: str = "auto"  # "yes", "no" or "auto": over fsdp if they are too large otherwise
    train_tokens: int = 0  # maximum of a micro-batch, per data shard; 0: as many as fit and are useful
    longest_row: int = 0  # tokens of the longest training row; 0: that of longest_row(max_context)
    loss_processes: int = 2  # that run custom losses, at most
    loss_memory_bytes: int = 8 << 30  # of each of them
    batch_invariant: bool = False  # whether the shapes of programs keep rows' bits apart from their company
    # Rows of the pool for tokens of images; 0: text only, and no tower is loaded; None: a micro-batch's
    image_tokens: int | None = 0
    image_tokens_each: int = 16_384  # maximum of one image
    remat: str = "auto"  # what training computes twice, of remat.REMAT_LEVELS; "auto": by memory

    @property
    def trains(self) -> bool:
        """Whether there are training slots, and room for steps of training."""
        return self.role == "train"


def longest_row(max_context: int) -> int:
    """Return the tokens of the longest rows: a power of two, or a multiple of ROW_STEP that is shorter."""
    doubled = SHORTEST_ROW
    while doubled < max_context:
        doubled *= 2
    return min(doubled, ROW_STEP * -(-max_context // ROW_STEP))
