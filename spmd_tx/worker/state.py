"""All arrays of a worker: declared, and made when it starts."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from spmd_tx.models import qwen3
from spmd_tx.models.config import ModelConfig
from spmd_tx.models.huggingface import load
from spmd_tx.models.kv_cache import KvCache, cache_weights
from spmd_tx.models.lora import adapter_weights
from spmd_tx.models.qwen3 import Weights
from spmd_tx.protocol import Setup
from spmd_tx.sharding.mesh import DATA
from spmd_tx.sharding.weight import Weight, is_weight, shardings
from spmd_tx.worker.memory import cache_pages, compute_dtype, splits_base_weights
from spmd_tx.worker.sample import Bank, RowState
from spmd_tx.worker.train_state import TrainState, train_weights


@dataclass
class WorkerState:
    """The same fields hold the declarations (Weight leaves) or the arrays."""

    base: Weights[Any]
    train: TrainState
    bank: Bank
    cache: KvCache
    rows: RowState


def declare(setup: Setup, model: ModelConfig, mesh: Mesh, pages: int, split_base: bool) -> WorkerState:
    """Declare every array, with ``pages`` cache pages per data shard."""
    dtype = compute_dtype(setup)
    bank = adapter_weights(model, mesh, setup.bank_slots, setup.max_rank, dtype, zero=False)
    row = Weight((setup.decode_rows,), P(DATA), jnp.int32)
    return WorkerState(
        base=qwen3.weights(model, mesh, dtype, split_over_fsdp=split_base),
        train=train_weights(model, mesh, setup.adapter_slots, setup.max_rank),
        bank=Bank(bank, Weight((setup.bank_slots, 2), P(), jnp.float32)),
        cache=cache_weights(model, mesh, pages, setup.page_size, dtype),
        rows=RowState(row, row, row),
    )


def allocate(
    setup: Setup, model: ModelConfig, mesh: Mesh, progress: Callable[[str], None]
) -> tuple[WorkerState, WorkerState, int]:
    """(declarations, arrays, pages per data shard): weights loaded, the rest zero."""
    split_base = splits_base_weights(setup, model, mesh)
    declared = declare(setup, model, mesh, 1, split_base)
    base = load(Path(setup.model_dir), declared.base, mesh, progress)
    progress("allocating adapters")
    train, bank = zeros(mesh, declared.train), zeros(mesh, declared.bank)
    pages = cache_pages(setup, model, mesh)
    progress(f"allocating {pages} pages of {setup.page_size} tokens")
    declared = declare(setup, model, mesh, pages, split_base)
    state = WorkerState(base, train, bank, zeros(mesh, declared.cache), zeros(mesh, declared.rows))
    return declared, state, pages


def zeros(mesh: Mesh, declared: Any) -> Any:
    """Arrays of zeros, made where they live. One buffer per leaf: shared ones could not be donated."""

    def make() -> Any:
        return jax.tree.map(lambda weight: jnp.zeros(weight.shape, weight.dtype), declared, is_leaf=is_weight)

    return jax.jit(make, out_shardings=shardings(mesh, declared))()
