"""How much memory the devices have, and what is planned with it. All processes decide alike."""

import os
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.typing import DTypeLike

from spmd_tx.errors import StartError
from spmd_tx.models.config import ModelConfig
from spmd_tx.protocol import Setup
from spmd_tx.worker.plan import Memory, Plan, best_plan
from spmd_tx.worker.plan_measure import measured_plan
from spmd_tx.worker.plan_refusal import refusal
from spmd_tx.worker.plan_sizes import Sizes

CPU_CACHE_TOKENS = 32768  # per data shard, where device memory is host memory
HOST_SHARE = 0.6  # of a host's memory, where it is the devices': others work there, too
FREE_SHARE = 0.8  # of what is free there, that arrays may take which stay
USABLE_SHARE = 0.96  # of an accelerator's memory: what is freed and taken again leaves gaps
MIB = 2**20

MEMINFO = Path("/proc/meminfo")
CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def compute_dtype(setup: Setup) -> DTypeLike:
    """The dtype of base weights, activations and the bank."""
    return dtype_on(setup.dtype, jax.default_backend())


def dtype_on(name: str, platform: str) -> DTypeLike:
    """The type that an option's value means."""
    if name == "auto":
        name = "float32" if platform == "cpu" else "bfloat16"
    return {"float32": jnp.float32, "bfloat16": jnp.bfloat16}[name]


def plan_memory(setup: Setup, model: ModelConfig, mesh: Mesh, progress: Callable[[str], None]) -> Plan:
    """Decide what goes where, before anything is allocated. Raises StartError if there is no room.

    The choices follow from how much memory there is, not from how much is free now, so that they are the
    same whenever requests are run again. Where memory is the host's, only the cache depends on the latter.
    """
    sizes = Sizes(setup, model, mesh, compute_dtype(setup))
    limits = _limits(mesh)
    if limits is not None:
        return measured_plan(sizes, Memory(_agreed(USABLE_SHARE * limits)), progress, _most)
    share = 1 / (setup.num_processes * jax.local_device_count())
    return make_plan(
        sizes,
        Memory(
            bytes=_agreed(HOST_SHARE * host_bytes() * share),
            most_cache_tokens=CPU_CACHE_TOKENS,
            most_resident=_agreed(FREE_SHARE * free_host_bytes() * share),
        ),
    )
