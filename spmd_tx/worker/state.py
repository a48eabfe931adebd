"""All arrays of a worker: declared, and made when it starts."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from spmd_tx.models import qwen3
from spmd_tx.models.config import ModelConfig
from spmd_tx.models.huggingface import load
from spmd_tx.models.kv_cache import KvCache, cache_weights
from spmd_tx.models.lora import adapter_weights
from spmd_tx.models.qwen3 import Weights
from spmd_tx.protocol import Setup
from spmd_tx.sharding.mesh import DATA
from spmd_tx.sharding.weight import Weight, is_weight, shardings
from spmd_tx.worker.sample import Bank, RowState
from spmd_tx.worker.train_state import TrainState, train_weights

CPU_CACHE_TOKENS = 32768  # per data shard, where device memory is host memory
ACTIVATION_SHARE = 0.2  # of device memory, left for activations when the cache takes the rest
MEMORY_SHARE = 0.9  # of device memory that is used at all


@dataclass
class WorkerState:
    """The same fields hold the declarations (Weight leaves) or the arrays."""

    base: Weights[Any]
    train: TrainState
    bank: Bank
    cache: KvCache
    rows: RowState


def compute_dtype(setup: Setup) -> DTypeLike:
    """The dtype of base weights, activations and the bank."""
    name = setup.dtype
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return {"float32": jnp.float32, "bfloat16": jnp.bfloat16}[name]


def declare(setup: Setup, model: ModelConfig, mesh: Mesh, pages: int) -> WorkerState:
    """Declare every array, with ``pages`` cache pages per data shard."""
    dtype = compute_dtype(setup)
    bank = adapter_weights(model, mesh, setup.bank_slots, setup.max_rank, dtype, zero=False)
    row = Weight((setup.decode_rows,), P(DATA), jnp.int32)
    return WorkerState(
        base=qwen3.weights(model, mesh, dtype),
        train=train_weights(model, mesh, setup.adapter_slots, setup.max_rank),
        bank=Bank(bank, Weight((setup.bank_slots,), P(), jnp.float32)),
        cache=cache_weights(model, mesh, pages, setup.page_size, dtype),
        rows=RowState(row, row, row),
    )


def allocate(
    setup: Setup, model: ModelConfig, mesh: Mesh, progress: Callable[[str], None]
) -> tuple[WorkerState, WorkerState, int]:
    """(declarations, arrays, pages per data shard): weights loaded, the rest zero."""
    declared = declare(setup, model, mesh, 1)
    base = load(Path(setup.model_dir), declared.base, mesh, progress)
    progress("allocating adapters")
    train, bank = zeros(mesh, declared.train), zeros(mesh, declared.bank)
    pages = cache_pages(setup, model, mesh)
    progress(f"allocating {pages} pages of {setup.page_size} tokens")
    declared = declare(setup, model, mesh, pages)
    state = WorkerState(base, train, bank, zeros(mesh, declared.cache), zeros(mesh, declared.rows))
    return declared, state, pages


def zeros(mesh: Mesh, declared: Any) -> Any:
    """Arrays of zeros, made where they live. One buffer per leaf: shared ones could not be donated."""

    def make() -> Any:
        return jax.tree.map(lambda weight: jnp.zeros(weight.shape, weight.dtype), declared, is_leaf=is_weight)

    return jax.jit(make, out_shardings=shardings(mesh, declared))()


def cache_pages(setup: Setup, model: ModelConfig, mesh: Mesh) -> int:
    """Pages per data shard: as configured, else what the devices have left. Page 0 is extra."""
    least = setup.max_context + 2 * setup.decode_steps + 2 * setup.page_size  # one sequence at full length
    tokens = setup.kv_cache_tokens or _tokens_that_fit(setup, model, mesh) or CPU_CACHE_TOKENS
    if jax.process_count() > 1:  # one global array: the process that has least room decides
        tokens = int(multihost_utils.process_allgather(np.int32(tokens)).min())
    return -(-max(tokens, least) // setup.page_size) + 1


def _tokens_that_fit(setup: Setup, model: ModelConfig, mesh: Mesh) -> int | None:
    """From the device that has least left; None where the platform does not tell (CPU)."""
    all_stats = [device.memory_stats() for device in mesh.local_devices]
    free = [
        stats["bytes_limit"] * (MEMORY_SHARE - ACTIVATION_SHARE) - stats["bytes_in_use"]
        for stats in all_stats
        if stats
    ]
    if not free:
        return None
    page = jax.tree.leaves(cache_weights(model, mesh, 1, 1, compute_dtype(setup)), is_leaf=is_weight)
    per_token = 0
    for weight in page:
        local = shardings(mesh, weight).shard_shape(weight.shape)
        per_token += jnp.dtype(weight.dtype).itemsize * math.prod(local)
    return max(0, int(min(free)) // per_token)
