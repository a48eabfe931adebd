"""Reads how much memory the devices have, and makes the plan for it. All processes decide the same."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.typing import DTypeLike

from spmd_tx.models.declared.model import Model
from spmd_tx.protocol.setup import Setup
from spmd_tx.sharding.mesh import platform
from spmd_tx.worker.memory.host import host_bytes
from spmd_tx.worker.memory.measure import Measure, measured_plan
from spmd_tx.worker.memory.plan import Plan, UsableMemory
from spmd_tx.worker.memory.refusal import make_plan
from spmd_tx.worker.memory.sizes import Sizes

USABLE_SHARE = 0.96  # of JAX's pool on an accelerator; fragmentation takes the rest

# Where device memory is host memory:
HOST_SHARE = 0.6  # of a host's memory; other programs need some
FREE_SHARE = 0.8  # of what is free at the start, for the arrays that stay
CPU_CACHE_TOKENS = 32768  # per data shard
CPU_SAVED_BYTES = 512 * 2**20  # per device; on a CPU, fresh pages cost more than recomputing a product

MIB = 2**20


def compute_dtype(setup: Setup) -> DTypeLike:
    """The dtype of base weights, activations and the bank."""
    return dtype_on(jax.default_backend(), setup.dtype)


def dtype_on(platform: str, name: str) -> DTypeLike:
    """Resolve the dtype option for a platform."""
    if name == "auto":
        name = "float32" if platform == "cpu" else "bfloat16"
    return {"float32": jnp.float32, "bfloat16": jnp.bfloat16}[name]


def plan_memory(
    setup: Setup,
    model: Model,
    mesh: Mesh,
    progress: Callable[[str], None],
    measure: Measure,
) -> Plan:
    """Make the memory plan before anything is allocated. Raises StartError if nothing fits.

    The choices depend on the total memory, not on what is free now, so that they are the same when requests
    are run again. In host memory, the size of the cache depends on both.
    """
    sizes = Sizes(setup, model, mesh, compute_dtype(setup))
    limits = [stats["bytes_limit"] for stats in _memory_stats(mesh)]
    if limits:
        usable = _least_of_all(int(USABLE_SHARE * min(limits)))
        memory = UsableMemory(usable, platform(mesh))
        return measured_plan(sizes, memory, progress, _most_of_all, measure)
    share = 1 / ((setup.host_processes or setup.num_processes) * jax.local_device_count())
    return make_plan(sizes, of_host(share, _least_of_all))


def of_host(share: float, agreed: Callable[[int], int] = int) -> UsableMemory:
    """Return what a device may use if it owns this share of the host's memory."""
    total, free = host_bytes()
    return UsableMemory(
        bytes=agreed(int(HOST_SHARE * share * total)),
        platform="cpu",
        most_cache_tokens=CPU_CACHE_TOKENS,
        most_resident=agreed(int(FREE_SHARE * share * free)),
        most_saved=CPU_SAVED_BYTES,
    )


def _memory_stats(mesh: Mesh) -> list[dict[str, int]]:
    """Return the statistics of this process's devices; none where the platform has none (CPU)."""
    all_stats = [device.memory_stats() for device in mesh.local_devices]
    return [stats for stats in all_stats if stats]


def _least_of_all(size: int) -> int:
    """Return the least of all processes' sizes, in whole MiB: all must decide the same."""
    return MIB * int(_everybodys(size / MIB).min())


def _most_of_all(ratio: float) -> float:
    return float(_everybodys(ratio).max())


def _everybodys(amount: float) -> np.ndarray:
    if jax.process_count() == 1:
        return np.array([amount])
    return np.asarray(multihost_utils.process_allgather(np.float32(amount)))
