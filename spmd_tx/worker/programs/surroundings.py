"""What compiled programs depend on besides the shapes of their arguments, as one text."""

import hashlib
import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import jax
import msgspec
from jax.sharding import Mesh

import spmd_tx
from spmd_tx.worker.memory.plan import Plan

# Settings of a server that programs do not depend on. Whatever else is in a Setup may change them.
INDIFFERENT = (
    "generation",
    "host_processes",
    "jax_coordinator",
    "jax_port",
    "model_dir",
    "model_name",
    "compilation_cache",
    "may_have_fewer_slots",
    "idle_adapters",
    "kernel_choices",
    "loss_processes",
    "loss_memory_bytes",
)
TRACED = "models", "protocol", "sharding", "worker"  # the packages that make programs
VARIABLES = ("XLA_", "JAX_", "TF_", "NPROC", "PJRT_", "OMP_", "LLVM_", "CUDA_", "NVIDIA_", "NCCL_")
# JAX's settings of where and how it keeps and logs things.
NOT_TRACED = ("cache", "log", "explain", "platforms", "traceback", "dump")
CPU_FACTS = ("vendor_id", "model name", "cpu family", "model\t", "stepping", "flags", "Features", "CPU part")


def surroundings(plan: Plan, mesh: Mesh) -> str:
    """Return the text. Equal texts and equal descriptions of calls mean equal programs."""
    return "\n".join(_facts(plan, mesh))


def traced_settings() -> dict[str, bool | int | float | str | None]:
    """Return JAX's settings that may change what it compiles."""
    return {
        name: value
        for name, value in sorted(jax.config.values.items())
        if not any(word in name for word in NOT_TRACED)
    }


def _facts(plan: Plan, mesh: Mesh) -> Iterator[str]:
    sizes = plan.sizes
    setup = {
        name: value for name, value in msgspec.structs.asdict(sizes.setup).items() if name not in INDIFFERENT
    }
    yield f"python {sys.version_info[:2]} {platform.machine()}"
    yield from (f"{name} {metadata.version(name)}" for name in ("jax", "jaxlib", "numpy"))
    yield f"source {source()}"
    yield f"settings {traced_settings()}"
    variables = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(VARIABLES)}
    yield f"environment { {name: value for name, value in variables.items() if 'CACHE' not in name} }"
    yield f"processors {len(os.sched_getaffinity(0)) if sys.platform == 'linux' else os.cpu_count()}"
    yield f"processor {processor()}"
    yield f"platform {mesh.devices.flat[0].client.platform_version}"
    yield f"processes {jax.process_count()}, this is {jax.process_index()}"
    yield f"devices {[(each.id, each.device_kind) for each in mesh.devices.flat]} of {jax.device_count()}"
    yield f"mesh {mesh.axis_names} {mesh.devices.shape}"
    yield f"model {sizes.model} {sizes.dtype}"
    yield f"setup {sorted(setup.items())}"
    yield f"plan {plan.levels} {plan.splits_base} {plan.decode_rows}"


def source() -> str:
    """Return a digest of the source that is traced, and of what decides what is."""
    root = Path(spmd_tx.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for package in TRACED for path in (root / package).rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def processor() -> str:
    """Return what kind of processor this is; XLA uses the instructions that it has."""
    about = Path("/proc/cpuinfo")
    if not about.exists():
        return platform.processor()
    first = about.read_text().split("\n\n")[0].splitlines()
    return "; ".join(line for line in first if line.startswith(CPU_FACTS))
