"""Tells from Linux's counters whether the kernel has killed processes here for lack of memory.

Such a process looks like one that an operator has killed: both end by SIGKILL. Without these counters the
answer is always no.
"""

from collections import deque
from collections.abc import Sequence
from pathlib import Path

from spmd_tx.protocol.reports import BEAT_SECONDS

RECENT_SECONDS = 30.0  # a large process may take long to end


def find_counters(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> list[Path]:
    """Files with a line "oom_kill COUNT", of this process's control groups, or else of the whole machine.

    A container may see its own group as the root of the tree.
    """
    candidates = []
    for line in _lines(proc / "self" / "cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":  # version 2, also beside version 1
            trees, file = [groups, groups / "unified"], "memory.events"
        elif "memory" in controllers.split(","):
            trees, file = [groups / "memory"], "memory.oom_control"
        else:
            continue
        for tree in trees:
            candidates.append([tree / path.lstrip("/") / file, tree / file])
    counters = [next((file for file in files if _count(file) is not None), None) for files in candidates]
    return [file for file in counters if file is not None] or [proc / "vmstat"]


class OomKills:
    """Counts OOM kills. ``note`` must be called every BEAT_SECONDS."""

    def __init__(self, counters: Sequence[Path] | None = None) -> None:
        self._counters = find_counters() if counters is None else counters
        self._recent = deque([self._total()], maxlen=round(RECENT_SECONDS / BEAT_SECONDS))

    def note(self) -> None:
        self._recent.append(self._total())

    def were_recent(self) -> bool:
        """Whether there was one in the last RECENT_SECONDS."""
        return self._total() > self._recent[0]

    def _total(self) -> int:
        return sum(_count(counter) or 0 for counter in self._counters)


def _count(counter: Path) -> int | None:
    for line in _lines(counter):
        name, _, value = line.partition(" ")
        if name == "oom_kill" and value.isdecimal():
            return int(value)
    return None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
