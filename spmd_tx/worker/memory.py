"""What fits on the devices: whether base weights are split over fsdp, and how many pages the cache has."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.typing import DTypeLike

from spmd_tx.models import qwen3
from spmd_tx.models.config import ModelConfig
from spmd_tx.models.kv_cache import cache_weights
from spmd_tx.protocol import Setup
from spmd_tx.sharding.mesh import FSDP
from spmd_tx.sharding.weight import is_weight, shardings

CPU_CACHE_TOKENS = 32768  # per data shard, where device memory is host memory
ACTIVATION_SHARE = 0.2  # of device memory, left for activations when the cache takes the rest
MEMORY_SHARE = 0.9  # of device memory that is used at all
REPLICATED_SHARE = 0.5  # of device memory: the most that base weights may take before fsdp splits them


def compute_dtype(setup: Setup) -> DTypeLike:
    """The dtype of base weights, activations and the bank."""
    name = setup.dtype
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return {"float32": jnp.float32, "bfloat16": jnp.bfloat16}[name]


def splits_base_weights(setup: Setup, model: ModelConfig, mesh: Mesh) -> bool:
    """Whether every device of fsdp holds a part of the base weights instead of all of them."""
    if mesh.shape[FSDP] == 1 or setup.shard_base_weights == "no":
        return False
    if setup.shard_base_weights == "yes":
        return True
    limits = [stats["bytes_limit"] for stats in _memory_stats(mesh)]
    room = _agreed(min(limits) / 2**20 if limits else math.inf)  # MiB
    weights = _bytes_per_device(mesh, qwen3.weights(model, mesh, compute_dtype(setup))) / 2**20
    return weights > REPLICATED_SHARE * room and model.d_model % mesh.shape[FSDP] == 0


def cache_pages(setup: Setup, model: ModelConfig, mesh: Mesh) -> int:
    """Pages per data shard: as configured, else what the devices have left. Page 0 is extra."""
    least = setup.max_context + 2 * setup.decode_steps + 2 * setup.page_size  # one sequence at full length
    tokens = setup.kv_cache_tokens or _tokens_that_fit(setup, model, mesh) or CPU_CACHE_TOKENS
    return -(-max(int(_agreed(tokens)), least) // setup.page_size) + 1


def activation_budget(mesh: Mesh) -> int | None:
    """Bytes per device that are left for activations, whatever is free now; None on a CPU."""
    limits = [stats["bytes_limit"] for stats in _memory_stats(mesh)]
    if not limits:
        return None
    return int(_agreed(int(min(limits) * ACTIVATION_SHARE) // 2**20)) * 2**20


def _agreed(amount: float | int) -> float | int:
    """That of the process which has least: all processes must decide alike."""
    if jax.process_count() == 1:
        return amount
    return float(multihost_utils.process_allgather(np.float32(amount)).min())


def _tokens_that_fit(setup: Setup, model: ModelConfig, mesh: Mesh) -> int | None:
    """From the device that has least left; None where the platform does not tell (CPU)."""
    free = [
        stats["bytes_limit"] * (MEMORY_SHARE - ACTIVATION_SHARE) - stats["bytes_in_use"]
        for stats in _memory_stats(mesh)
    ]
    if not free:
        return None
    per_token = _bytes_per_device(mesh, cache_weights(model, mesh, 1, 1, compute_dtype(setup)))
    return max(0, int(min(free)) // per_token)


def _memory_stats(mesh: Mesh) -> list[dict[str, int]]:
    """Of this process's devices; none where the platform does not tell (CPU)."""
    all_stats = [device.memory_stats() for device in mesh.local_devices]
    return [stats for stats in all_stats if stats]


def _bytes_per_device(mesh: Mesh, declared: Any) -> int:
    total = 0
    for weight in jax.tree.leaves(declared, is_leaf=is_weight):
        local = shardings(mesh, weight).shard_shape(weight.shape)
        total += jnp.dtype(weight.dtype).itemsize * math.prod(local)
    return total
