"""A GPU to lower kernels for on machines without one."""

from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from spmd_tx.sharding.mesh import AXES

# From JAX 0.12 on, a kernel for Triton can only be lowered for a GPU that is there, or is named like this.
ABSENT_GPU = AbstractMesh(
    (1,) * len(AXES),
    AXES,
    axis_types=(AxisType.Auto,) * len(AXES),
    abstract_device=AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu"),
)
