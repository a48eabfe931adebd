"""Parses ``--devices``: how many devices of which kind, and how much memory each of them has."""

import re
from dataclasses import dataclass

from spmd_tx.byte_sizes import parse_size
from spmd_tx.errors import StartError

# GiB as the driver reports them, which are fewer than the product's name says.
MEMORY = {
    "a10g": 22.0,
    "a100": 79.1,
    "a100-40": 39.4,
    "b200": 178.3,
    "h100": 79.1,
    "h200": 139.8,
    "l4": 22.0,
    "l40s": 44.4,
    "rtx3090": 23.6,
    "rtx4090": 23.5,
    "rtx5090": 31.3,
}
CPU = "cpu"


@dataclass(frozen=True)
class Devices:
    """Holds the number, kind and memory of devices that are all alike."""

    count: int
    kind: str  # a name of MEMORY, CPU, or "" where only the memory is known
    bytes: int | None  # of each; None: the CPUs' is that of this host

    @property
    def is_cpu(self) -> bool:
        return self.kind == CPU


def parse_devices(text: str, memory: str | None) -> Devices:
    """Parse "8xh100", "h200", "4xcpu" or, with the memory of each, "8". Raises StartError."""
    match = re.fullmatch(r"(?:(\d+)\s*x?)?\s*([a-z][a-z0-9 -]*)?", text.strip().lower())
    if match is None or not text.strip() or match[1] == "0":
        raise StartError(f"--devices is {text!r}; write how many of which, as 8xh100, or how many")
    count, kind = int(match[1] or 1), (match[2] or "").replace(" ", "")
    if memory is not None:
        try:
            return Devices(count, kind, parse_size(memory, whole=0))
        except ValueError as error:
            raise StartError(f"--memory-per-device is wrong: {error}") from None
    if kind == CPU:
        return Devices(count, kind, None)
    if kind not in MEMORY:
        known = ", ".join([*MEMORY, CPU])
        what = f"of {kind!r} is not known" if kind else "of a device is not given"
        raise StartError(f"how much memory one {what}; add --memory-per-device, or name one of {known}")
    return Devices(count, kind, int(MEMORY[kind] * 2**30))
