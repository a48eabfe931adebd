"""What must be installed and set before JAX is imported, to compile for absent devices. No JAX here."""

import os
from importlib.util import find_spec

from spmd_tx.errors import StartError
from spmd_tx.worker.memory.accelerators import ACCELERATORS, Devices

# The modules that have the compilers, and the extras that install them.
COMPILERS = {"tpu": (("libtpu",), "aot-tpu"), "gpu": (("jax_cuda12_plugin", "jax_cuda13_plugin"), "aot-cuda")}
TPU_NAMES = {"v5e": "v5litepod-{chips}", "v5p": "v5p-{cores}", "v6e": "v6e-{chips}"}
OF_TPUS = {
    "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # nothing is opened, so several processes may do this at once
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_MIN_LOG_LEVEL": "3",
}


def check(devices: Devices) -> None:
    """Refuse devices for which nothing can be compiled here, and say what is missing. Raises StartError."""
    known = devices.accelerator
    compilable = [name for name, each in ACCELERATORS.items() if each.flops]
    if known is None or not known.flops:
        raise StartError(
            f"--compile does not know {devices.kind or 'devices without a name'}; "
            f"it knows {', '.join(compilable)}"
        )
    if known.platform == "tpu" and not devices.topology:
        raise StartError(
            f"--compile needs the topology of a TPU slice: write --devices {devices.kind}:{known.slice} for "
            "eight chips"
        )
    modules, extra = COMPILERS[known.platform]
    if not any(find_spec(module) for module in modules):
        raise StartError(
            f"compiling for {devices.kind} needs {' or '.join(modules)}, which is not installed; install it "
            f"with: pip install 'spmd_tx[{extra}]'"
        )


def prepare(devices: Devices) -> None:
    """Set the environment. JAX itself must see CPUs only, since it would look for the devices otherwise."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"  # as workers have it
    # XLA warns of memory that it would like to spare; what a program needs is in the report.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if devices.platform != "tpu":
        return
    name = TPU_NAMES[devices.kind].format(chips=devices.count, cores=2 * devices.count)
    for variable, value in (OF_TPUS | {"TPU_ACCELERATOR_TYPE": name}).items():
        os.environ.setdefault(variable, value)
