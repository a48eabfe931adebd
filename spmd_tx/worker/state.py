"""The declarations of all arrays of a worker, and their allocation at its start."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from spmd_tx.models.adapters.lora import adapter_weights
from spmd_tx.models.attention.kv_cache import KvCache
from spmd_tx.models.base_weights import Weights, weights
from spmd_tx.models.checkpoint.huggingface import load
from spmd_tx.models.linear_attention.state_pool import Keep, cache_and_states
from spmd_tx.sharding.mesh import DATA
from spmd_tx.sharding.tree_node import TreeNode
from spmd_tx.sharding.weight import Weight, shardings
from spmd_tx.worker.memory.plan import Plan
from spmd_tx.worker.steps.decode_rows import RowState
from spmd_tx.worker.steps.full import full_state
from spmd_tx.worker.steps.sample import Bank
from spmd_tx.worker.steps.train_state import train_weights


class WorkerState(TreeNode, frozen=False):
    """Holds all arrays of a worker, or their declarations (leaves are Weights)."""

    base: Weights[Any]
    train: Any  # TrainState, or FullState where all weights are trained; None: nothing is trained
    bank: Bank
    cache: KvCache | Keep
    rows: RowState  # that the last Decode left
    next_rows: RowState  # for the next one to fill, block by block
    tower: Any  # TowerWeights; None: images are not read
    tables: Any  # int32 [most rows of a Decode, N]: pages of the rows of the last Decode


def declare(plan: Plan) -> WorkerState:
    """Declare every array."""
    setup, model, mesh, dtype = plan.sizes.setup, plan.sizes.model, plan.sizes.mesh, plan.sizes.dtype
    bank = adapter_weights(model, mesh, setup.bank_slots, setup.max_rank, dtype, zero=False)
    rows = plan.rows_of_decode
    row = Weight((rows,), P(DATA), jnp.int32)
    base, sight = weights(model, mesh, dtype, split_over_fsdp=plan.splits_base), plan.sizes.sight
    return WorkerState(
        base=base.replace(images=sight.pool) if sight else base,
        train=(
            full_state(model, mesh)
            if setup.full_copies
            else train_weights(model, mesh, setup.adapter_slots, setup.max_rank)
        ),
        bank=Bank(bank, Weight((setup.bank_slots, 2), P(), jnp.float32)),
        cache=cache_and_states(model, mesh, plan.pages, setup.page_size, plan.state_slots, dtype),
        rows=RowState(row, row, row),
        next_rows=RowState(row, row, row),
        tower=sight.tower if sight else None,
        tables=Weight((rows, plan.sizes.widest_table // setup.page_size), P(DATA), jnp.int32),
    )


def allocate(plan: Plan, progress: Callable[[str], None]) -> tuple[WorkerState, WorkerState]:
    """Return (declarations, arrays), with the weights loaded and the rest zero."""
    declared, mesh, setup = declare(plan), plan.sizes.mesh, plan.sizes.setup
    assert isinstance(mesh, Mesh), "there are devices"
    unread = plan.sizes.model.unread
    model_dir, tower, images = Path(setup.model_dir), None, declared.base.images
    base = load(model_dir, declared.base.replace(images=None), mesh, progress, unread)
    if images is not None:
        base = base.replace(images=zeros(mesh, images))
    if (of_model := plan.sizes.model.tower) is not None and declared.tower is not None:
        progress("loading the vision tower")
        tower = load(model_dir, declared.tower, mesh, progress, of_model.unread)
    progress("allocating adapters")
    train = zeros(mesh, declared.train) if setup.trains else None
    bank = zeros(mesh, declared.bank)
    states = f", and {plan.state_slots} states" if plan.state_slots else ""
    progress(f"allocating {plan.pages} pages of {setup.page_size} tokens{states}")
    of_sampling = declared.cache, declared.rows, declared.next_rows, declared.tables
    cache, rows, next_rows, tables = (zeros(mesh, each) for each in of_sampling)
    return declared, WorkerState(base, train, bank, cache, rows, next_rows, tower, tables)


def zeros(mesh: Mesh, declared: Any) -> Any:
    """Make arrays of zeros on their devices, one buffer per leaf: shared ones could not be donated."""

    def make() -> Any:
        return jax.tree.map(lambda weight: jnp.zeros(weight.shape, weight.dtype), declared)

    return jax.jit(make, out_shardings=shardings(mesh, declared))()
