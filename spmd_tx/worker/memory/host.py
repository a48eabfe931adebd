"""How much host memory is available for idle adapters."""

from pathlib import Path

IDLE_SHARE = 0.3  # of the memory free at the start, for idle adapters
MOST_PINNED = 48 << 30  # bytes; XLA pins at most 64 GiB for one process

_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def idle_budget(processes: int) -> int:
    """Return bytes for idle adapters in one process, if all processes share this host."""
    return min(MOST_PINNED, int(IDLE_SHARE * available_bytes()) // processes)


def available_bytes() -> int:
    """Return what is free on this host, or in this process's container."""
    fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    available = 1024 * int(fields["MemAvailable"].split()[0])
    try:
        limit, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:  # no such limits here
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - int(used)))
