"""How much memory this host has left, for what need not be on a device."""

from pathlib import Path

IDLE_SHARE = 0.3  # of what is free at the start: the most that idle adapters take in host memory
MOST_PINNED = 48 << 30  # bytes; what XLA pins by itself for one process ends at 64 GiB

_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def idle_budget(processes: int) -> int:
    """Bytes for idle adapters in this one of the processes, all of which may be on this host."""
    return min(MOST_PINNED, int(IDLE_SHARE * available_bytes()) // processes)


def available_bytes() -> int:
    """What is free on this host, or in the container that this process may not leave."""
    fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    available = 1024 * int(fields["MemAvailable"].split()[0])
    try:
        limit, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:  # no such limits here
        return available
    return available if limit == "max" else min(available, max(0, int(limit) - int(used)))
