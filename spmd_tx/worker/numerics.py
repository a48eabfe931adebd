"""What decides the bits of results, by name, so that the coordinator can compare groups of one base model."""

import hashlib
import os
from importlib import metadata

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from spmd_tx.worker.memory.plan import Plan
from spmd_tx.worker.programs.surroundings import processor

PASSED_ON = ("base_dtype", "expert_weights", "expert_lora", "tensor parallelism", "expert parallelism")
SETTINGS = ("jax_disable_most_optimizations", "jax_default_matmul_precision")  # of the compiler


def numerics(plan: Plan, mesh: Mesh, choices: str) -> dict[str, str]:
    """Return the facts. ``choices`` names the kernels that were chosen by trying them.

    How many data shards there are is none of them: a row's numbers do not depend on it.
    """
    sizes = plan.sizes
    setup, device = sizes.setup, mesh.devices.flat[0]
    values = setup.base_dtype, setup.expert_weights, setup.expert_lora, setup.tp, setup.ep
    kernels = setup.kernels
    return {
        "dtype": jnp.dtype(sizes.dtype).name,
        **{name: str(value) for name, value in zip(PASSED_ON, values, strict=True)},
        "device": _processor() if device.platform == "cpu" else device.device_kind,
        "jaxlib": metadata.version("jaxlib"),
        "compiler": ", ".join([*(str(jax.config.values[name]) for name in SETTINGS), *_flags()]),
        "kernels": ", ".join([kernels.rows, kernels.pages, kernels.products, kernels.decode, kernels.images]),
        "choices of kernels": choices or "none",
    }


def _flags() -> list[str]:
    return sorted(os.environ.get("XLA_FLAGS", "").split())


def _processor() -> str:
    """Identify a CPU, whose instructions XLA uses."""
    return f"cpu {hashlib.blake2b(processor().encode(), digest_size=4).hexdigest()}"
