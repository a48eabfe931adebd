"""Finds out which devices this host has."""

import asyncio
import logging
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import msgspec

from spmd_tx.errors import StartError
from spmd_tx.processes.environments import of_worker
from spmd_tx.processes.parent import tied

logger = logging.getLogger(__name__)

COUNT = ("-m", "spmd_tx.worker.count_devices")
COUNT_SECONDS = 120.0
CPU = "cpu"
# Where the drivers of GPUs and TPUs show their devices. Where there are none of these, JAX need not be asked.
ACCELERATORS = ("nvidia[0-9]*", "dxg", "accel*", "kfd", "vfio/[0-9]*")  # dxg: GPUs of Windows, under WSL
PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin", "libtpu")
VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS")


class CountedDevices(msgspec.Struct, frozen=True):
    """Holds the number of devices, what they are, and how much memory each has."""

    kind: str
    count: int
    bytes: int | None = None


async def count_devices(environment: Mapping[str, str], folder: Path = Path("/dev")) -> CountedDevices:
    """Count the devices that a worker would see; the CPUs of a host are one. Raises StartError."""
    asked, shown = environment.get("JAX_PLATFORMS"), any(any(folder.glob(each)) for each in ACCELERATORS)
    if asked == CPU:
        return CountedDevices(CPU, 1)
    if not (asked or shown):
        for plugin in filter(find_spec, PLUGINS):
            text = "%s is installed, and %s shows no device for it: computing on CPUs"
            logger.warning(text, plugin, folder)
        return CountedDevices(CPU, 1)
    process = await asyncio.create_subprocess_exec(
        *tied([sys.executable, *COUNT]),
        env=of_worker(environment),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(COUNT_SECONDS):
            output, complaints = await process.communicate()
    except TimeoutError:
        raise _failure(f"it took more than {COUNT_SECONDS:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        lines = complaints.decode(errors="replace").strip().splitlines()
        why = lines[-1] if lines else f"exit code {process.returncode}"
        raise _failure(why) if shown else _absence(asked, folder, why)
    devices = msgspec.json.decode(output.splitlines()[-1], type=CountedDevices)
    return CountedDevices(CPU, 1) if devices.kind == CPU else devices


def restriction(environment: Mapping[str, str]) -> str:
    """How a launcher has restricted this process to some of the host's devices; empty: not at all."""
    return ";".join(f"{name}={environment[name]}" for name in VISIBLE if environment.get(name))


def _failure(why: str) -> StartError:
    return StartError(
        f"JAX cannot count the devices of this host: {why}; repair that, or give all three parallel sizes"
    )


def _absence(asked: str | None, folder: Path, why: str) -> StartError:
    return StartError(
        f"JAX_PLATFORMS is {asked}, and {folder} shows no GPU or TPU ({why}); give this host or container "
        "its devices and their driver, or unset JAX_PLATFORMS to compute on CPUs"
    )
