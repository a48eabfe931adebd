"""Makes a memory plan without the devices."""

import msgspec

from spmd_tx.models.attention import packed_rows
from spmd_tx.models.attention.paged import attention as paged
from spmd_tx.models.declared.model import Model
from spmd_tx.models.vision import attention as vision
from spmd_tx.protocol.kernels import Kernels, products_of
from spmd_tx.protocol.memory_plan import MemoryPlan
from spmd_tx.protocol.setup import Setup
from spmd_tx.sharding.mesh import AnyMesh, abstract_mesh
from spmd_tx.worker.memory.accelerators import Devices
from spmd_tx.worker.memory.decide import USABLE_SHARE, dtype_on, of_host
from spmd_tx.worker.memory.plan import Plan, UsableMemory, report
from spmd_tx.worker.memory.refusal import make_plan
from spmd_tx.worker.memory.sizes import Sizes
from spmd_tx.worker.xla_flags import MEMORY_FRACTION


def plan_offline(setup: Setup, model: Model, devices: Devices) -> MemoryPlan:
    """Return the plan that workers would make without measuring. Raises StartError if nothing fits."""
    mesh = abstract_mesh(setup.fsdp, setup.ep, setup.tp)
    return report(plan_on(mesh, with_kernels(setup, model, devices), model, devices))


def plan_on(mesh: AnyMesh, setup: Setup, model: Model, devices: Devices) -> Plan:
    """Return that plan for a mesh of such devices, or for an abstract one."""
    sizes = Sizes(setup, model, mesh, dtype_on(devices.platform, setup.dtype))
    return make_plan(sizes, usable_memory(devices))


def with_kernels(setup: Setup, model: Model, devices: Devices) -> Setup:
    """Put the fastest kernels that such devices have into the setup. How they run a decode is tried there."""
    platform, is_bfloat16 = devices.platform, setup.dtype != "float32"
    known = devices.accelerator
    kernels = Kernels(
        platform,
        rows=packed_rows.candidates(platform, model.head_dim, is_bfloat16)[0],
        pages=paged.candidates(platform, model.head_dim, setup.page_size, is_bfloat16)[0],
        images=vision.candidates(platform, model.tower is not None, is_bfloat16)[0],
        products=products_of(platform, known.capability if known else None)[0],
    )
    return msgspec.structs.replace(setup, kernels=kernels)


def usable_memory(devices: Devices) -> UsableMemory:
    """Return what workers would find that they may use of each device."""
    if devices.bytes is None:
        return of_host(1 / devices.count)
    # Only GPUs' memory is shared with libraries that take their own, so JAX's pool is smaller than it.
    fraction = float(MEMORY_FRACTION) if devices.platform != "tpu" else 1.0
    return UsableMemory(int(devices.bytes * fraction * USABLE_SHARE), devices.platform)
