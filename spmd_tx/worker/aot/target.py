"""What programs are compiled for: a mesh of devices that are not there, their speeds, and XLA's options."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
from jax.experimental import topologies
from jax.sharding import Mesh

from spmd_tx.errors import StartError
from spmd_tx.protocol.setup import Setup
from spmd_tx.sharding.mesh import make_mesh
from spmd_tx.worker.aot.gpu_targets import target_of
from spmd_tx.worker.aot.roofline import Speeds
from spmd_tx.worker.memory.accelerators import Devices
from spmd_tx.worker.memory.plan import Plan
from spmd_tx.worker.xla_flags import wanted_flags

FLAG_VALUES = {"true": True, "false": False}
# Of what compiles products, that which newer XLA can use without a device on which to try its choices.
UNTRIED = {"xla_gpu_experimental_autotune_backends": "TRITON"}
CUDNN = 91000  # the version of cuDNN that is answered for


@dataclass(frozen=True)
class CompileTarget:
    """Holds what the programs are compiled for."""

    mesh: Mesh
    hosts: Sequence[int]  # of each device, as far as links between them are slower
    peak: Speeds
    expected: Speeds
    options: dict[str, bool | str] = field(default_factory=dict)  # of XLA


def target_for(plan: Plan, devices: Devices) -> CompileTarget:
    """Return the target of a plan that was made for a mesh of ``open_mesh``."""
    known, mesh = devices.accelerator, plan.sizes.mesh
    assert known is not None, "the devices were checked"
    assert isinstance(mesh, Mesh), "they were opened"
    return CompileTarget(
        mesh,
        hosts_of(mesh, devices),
        Speeds.peak(known),
        Speeds.expected(known),
        compiler_options(plan.sizes.setup, devices),
    )


def open_mesh(devices: Devices, fsdp: int, ep: int, tp: int) -> Mesh:
    """Return a mesh of absent devices. Raises StartError if there is no such topology."""
    known = devices.accelerator
    assert known is not None, "the devices were checked"
    try:
        if known.platform == "tpu":
            topology = topologies.get_topology_desc(platform="tpu", topology_name=str(devices))
        else:
            hosts, each = -(-devices.count // known.per_host), min(devices.count, known.per_host)
            if hosts * each != devices.count:
                raise StartError(f"{devices} are not whole hosts of {known.per_host}; change the number")
            topology = topologies.get_topology_desc(
                platform="cuda", target_config=target_of(devices.kind), topology=f"{hosts}x1x{each}"
            )
    except (RuntimeError, ValueError, NotImplementedError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        remedy = f"; give another slice, such as {devices.kind}:{known.slice}" if known.slice else ""
        raise StartError(f"--devices {devices} cannot be compiled for: {reason}{remedy}") from None
    if len(topology.devices) != devices.count:
        raise StartError(f"--devices {devices} has {len(topology.devices)} devices, not {devices.count}")
    return make_mesh(fsdp, ep, tp, topology.devices)


def compiler_options(setup: Setup, devices: Devices) -> dict[str, bool | str]:
    """Return the flags with which workers run, as options of one compilation.

    That of the folder in which they keep choices of kernels is left out: without a GPU none are made.
    """
    if devices.platform != "gpu":
        return {}
    flags = wanted_flags(msgspec.structs.replace(setup, kernel_choices=""))
    pairs = (flag.removeprefix("--").split("=", 1) for flag in flags)
    return {name: FLAG_VALUES.get(value, value) for name, value in pairs} | UNTRIED


@contextmanager
def answering_for(devices: Devices) -> Iterator[None]:
    """Answer JAX's questions about the local GPU, of which cuDNN's attention depends, for the absent ones."""
    known = devices.accelerator
    if known is None or known.platform != "gpu":
        yield
        return
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    module: Any = cudnn
    answers: Mapping[str, Any] = {
        "check_compute_capability": lambda text: _capability(text) <= known.capability,
        "is_cuda_compute_capability_equal": lambda text: _capability(text) == known.capability,
        "check_cudnn_version": lambda: CUDNN,
    }
    before = {name: getattr(module, name) for name in answers if hasattr(module, name)}
    for name in before:
        setattr(module, name, answers[name])
    try:
        yield
    finally:
        for name, answer in before.items():
            setattr(module, name, answer)


def _capability(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def hosts_of(mesh: Mesh, devices: Devices) -> list[int]:
    """Return the host of each device of the mesh, in its order, as far as links between them are slower."""
    known = devices.accelerator
    if known is None or known.platform == "tpu":  # a slice's links do not end at its hosts
        return [0] * mesh.size
    places = sorted(range(mesh.size), key=lambda place: mesh.devices.flat[place].id)
    hosts = [0] * mesh.size
    for number, place in enumerate(places):
        hosts[place] = number // known.per_host
    return hosts
