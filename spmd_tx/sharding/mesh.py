"""The device mesh and the names of its axes."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from spmd_tx.errors import StartError
from spmd_tx.protocol.kernels import Platform

FSDP = "fsdp"  # rows are split over it; adapter state is stored split over it (ZeRO)
EP = "ep"  # rows are split over it; experts of a mixture live on it
TP = "tp"  # heads, feed-forward width and vocabulary are split over it (Megatron)
DATA = (FSDP, EP)  # the axes that split rows, major first: a data shard is one point of them
AXES = (FSDP, EP, TP)

AnyMesh = Mesh | AbstractMesh  # for code that needs the axes only


def make_mesh(fsdp: int, ep: int, tp: int, devices: Sequence[Any] | None = None) -> Mesh:
    """Arrange devices, by default all processes', in an [fsdp, ep, tp] grid.

    Raises StartError if there are too few.
    """
    size, devices = fsdp * ep * tp, jax.devices() if devices is None else devices
    if size > len(devices):
        raise StartError(
            f"the mesh fsdp {fsdp} x ep {ep} x tp {tp} needs {size} devices, but {len(devices)} are here; "
            "lower --fully-sharded-data-parallel-size, --expert-parallel-size or --tensor-parallel-size"
        )
    return jax.make_mesh((fsdp, ep, tp), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices[:size])


def abstract_mesh(fsdp: int, ep: int, tp: int) -> AbstractMesh:
    """Return the same grid without devices, to compute what each of them would hold."""
    return AbstractMesh((fsdp, ep, tp), AXES, axis_types=(AxisType.Auto,) * 3)


def platform(mesh: Mesh) -> Platform:
    """Return what the devices are: "cpu", "gpu" or "tpu"."""
    name = mesh.devices.flat[0].platform
    return "gpu" if name in ("cuda", "rocm") else name
