"""Reads how much memory this host or container has, and decides how much of it idle adapters may take."""

from pathlib import Path

import psutil

IDLE_SHARE = 0.3  # of the memory free at the start, for idle adapters
MOST_PINNED = 48 << 30  # bytes; XLA pins at most 64 GiB for one process
CGROUPS = (  # limit and use
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


def idle_budget(processes: int) -> int:
    """Return bytes for idle adapters in one process, if all processes share this host."""
    _, free = host_bytes()
    return min(MOST_PINNED, int(IDLE_SHARE * free) // processes)


def host_bytes() -> tuple[int, int]:
    """Return (total, free) bytes of this host or container."""
    memory = psutil.virtual_memory()
    total, free = memory.total, memory.available
    for limit_path, use_path in CGROUPS:
        limit, use = _number(limit_path), _number(use_path)
        if limit is not None:
            total = min(total, limit)
            free = min(free, max(0, limit - (use or 0)))
    return total, free


def _number(path: Path) -> int | None:
    """Read a cgroup file; None if it does not exist, or there is no limit."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
