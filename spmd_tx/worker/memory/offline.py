"""Makes a memory plan without the devices."""

import msgspec

from spmd_tx.models import attention
from spmd_tx.models.config import ModelConfig
from spmd_tx.protocol.commands import Setup
from spmd_tx.protocol.memory_plan import MemoryPlan
from spmd_tx.sharding.mesh import abstract_mesh
from spmd_tx.worker.accelerator import MEMORY_FRACTION
from spmd_tx.worker.memory.accelerators import Devices
from spmd_tx.worker.memory.decide import USABLE_SHARE, dtype_on, of_host
from spmd_tx.worker.memory.plan import Memory, report
from spmd_tx.worker.memory.refusal import make_plan
from spmd_tx.worker.memory.sizes import Sizes


def plan_offline(setup: Setup, model: ModelConfig, devices: Devices) -> MemoryPlan:
    """Return the plan that workers would make without measuring. Raises StartError if nothing fits.

    Accelerators are assumed to use their fastest attention.
    """
    dtype = dtype_on("cpu" if devices.is_cpu else "gpu", setup.dtype)
    is_possible = not devices.is_cpu and setup.dtype != "float32"
    fastest, *_ = attention.candidates(model.head_dim, is_possible)
    setup = msgspec.structs.replace(setup, attention=fastest)
    sizes = Sizes(setup, model, abstract_mesh(setup.fsdp, setup.ep, setup.tp), dtype)
    if devices.bytes is None:
        memory = of_host(1 / devices.count)
    else:
        usable = int(devices.bytes * float(MEMORY_FRACTION) * USABLE_SHARE)
        memory = Memory(usable, is_host=devices.is_cpu)
    return report(make_plan(sizes, memory))
