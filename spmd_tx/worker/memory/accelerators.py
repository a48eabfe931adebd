"""The accelerators that are known, and ``--devices``, which says how many of which there are.

Memory is what JAX finds: fewer GiB than the product's name says. The other figures are the vendors', for
dense bfloat16 products, for memory, and for what one device sends to others in one direction.
"""

import math
import re
from dataclasses import dataclass

from spmd_tx.byte_sizes import parse_size
from spmd_tx.errors import StartError
from spmd_tx.protocol.kernels import Platform


@dataclass(frozen=True)
class Accelerator:
    """Holds the figures of one device; 0 where they do not matter, because nothing is compiled for it."""

    memory: float  # GiB
    platform: Platform = "gpu"
    flops: float = 0.0  # per second
    bandwidth: float = 0.0  # bytes per second, of its memory
    links: float = 0.0  # bytes per second, to the other devices of its host, or of its slice
    network: float = 0.0  # bytes per second, to devices of other hosts
    per_host: int = 8
    capability: tuple[int, int] = (0, 0)  # of an NVIDIA GPU
    slice: str = ""  # an example of a topology, for a TPU


# GPUs: NVIDIA's data sheets; NVLink has half of its figure in each direction, and a network card of 400 Gb/s
# (A100: 200) belongs to each GPU. TPUs: cloud.google.com/tpu/docs and jax-ml.github.io/scaling-book; a ring
# over one axis of a slice uses two links of a chip.
ACCELERATORS = {
    "a10g": Accelerator(22.0, capability=(8, 6)),
    "a100": Accelerator(79.1, "gpu", 312e12, 2039e9, 300e9, 25e9, capability=(8, 0)),
    "a100-40": Accelerator(39.4, "gpu", 312e12, 1555e9, 300e9, 25e9, capability=(8, 0)),
    "b200": Accelerator(178.3, "gpu", 2250e12, 8000e9, 900e9, 50e9, capability=(10, 0)),
    "h100": Accelerator(79.1, "gpu", 989e12, 3352e9, 450e9, 50e9, capability=(9, 0)),
    "h200": Accelerator(139.8, "gpu", 989e12, 4800e9, 450e9, 50e9, capability=(9, 0)),
    "l4": Accelerator(22.0, capability=(8, 9)),
    "l40s": Accelerator(44.4, capability=(8, 9)),
    "rtx3090": Accelerator(23.6, capability=(8, 6)),
    "rtx4090": Accelerator(23.5, capability=(8, 9)),
    "rtx5090": Accelerator(31.3, capability=(12, 0)),
    "v5e": Accelerator(15.75, "tpu", 197e12, 819e9, 2 * 45e9, 2 * 45e9, slice="2x4"),
    "v5p": Accelerator(95.74, "tpu", 459e12, 2765e9, 2 * 90e9, 2 * 90e9, per_host=4, slice="2x2x2"),
    "v6e": Accelerator(31.25, "tpu", 918e12, 1640e9, 2 * 90e9, 2 * 90e9, slice="2x4"),
}
CPU = "cpu"
MOST_DEVICES = 1 << 16  # of one server


@dataclass(frozen=True)
class Devices:
    """Holds the number, kind and memory of devices that are all alike."""

    count: int
    kind: str  # a name of ACCELERATORS, CPU, JAX's name of a platform, or "" where only the memory is known
    bytes: int | None  # of each; None: the CPUs' is that of this host
    topology: str = ""  # of a TPU slice, as 2x4; empty: not given

    @property
    def accelerator(self) -> Accelerator | None:
        return ACCELERATORS.get(self.kind)

    @property
    def platform(self) -> Platform:
        """The platform; devices of which only the memory is known count as GPUs."""
        if self.accelerator is not None:
            return self.accelerator.platform
        return self.kind if self.kind in ("tpu", CPU) else "gpu"

    def __str__(self) -> str:
        if self.topology:
            return f"{self.kind}:{self.topology}"
        return f"{self.count} x {self.kind or 'device'}"


def parse_devices(text: str, memory: str | None) -> Devices:
    """Parse "8xh100", "h200", "v5e:2x4", "4xcpu" or, with the memory of each, "8". Raises StartError."""
    count, kind, topology = _named(text)
    if count > MOST_DEVICES:
        raise StartError(f"--devices is {text!r}; a server has at most {MOST_DEVICES} devices")
    if memory is not None:
        try:
            size = parse_size(memory, whole=0)
        except ValueError as error:
            raise StartError(f"--memory-per-device is wrong: {error}") from None
        if not size:  # a share would be one of nothing
            raise StartError(f"--memory-per-device is {memory!r}; write how much one has, as 80GiB")
        return Devices(count, kind, size, topology)
    if kind == CPU:
        return Devices(count, kind, None)
    if kind not in ACCELERATORS:
        known = ", ".join([*ACCELERATORS, CPU])
        what = f"a device called {kind!r}" if kind else "a device without a name"
        raise StartError(
            f"--devices is {text!r}, but the memory of {what} is not known; add --memory-per-device, or "
            f"write how many of which, as 8xh100. Known are {known}"
        )
    return Devices(count, kind, int(ACCELERATORS[kind].memory * 2**30), topology)


def _named(text: str) -> tuple[int, str, str]:
    """Return number, kind and topology."""
    written = text.strip().lower()
    slice_of = re.fullmatch(r"([a-z][a-z0-9]*):(\d+(?:x\d+)*)", written)
    if slice_of is not None and "0" not in (sizes := slice_of[2].split("x")):
        kind = slice_of[1]
        if kind in ACCELERATORS and ACCELERATORS[kind].platform != "tpu":
            raise StartError(
                f"--devices is {text!r}, but only TPUs have a topology; write how many, as 8x{kind}"
            )
        example = ACCELERATORS[kind].slice if kind in ACCELERATORS else ""
        wanted = len(example.split("x"))
        if example and len(sizes) != wanted:
            raise StartError(
                f"--devices is {text!r}, but slices of {kind} have {wanted} sizes, as in {kind}:{example}"
            )
        return math.prod(map(int, sizes)), kind, slice_of[2]
    match = re.fullmatch(r"(?:(\d+)\s*x?)?\s*([a-z][a-z0-9 -]*)?", written)
    if match is None or not written or match[1] == "0":
        raise StartError(
            f"--devices is {text!r}; write how many of which, as 8xh100, how many, or a slice, as v5e:2x4"
        )
    return int(match[1] or 1), (match[2] or "").replace(" ", ""), ""
