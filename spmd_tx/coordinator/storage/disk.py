"""Whether work can be stored now: the disk has room, and what was written last was written.

Losing a disk or a database is no error of a request. Work pauses until they are back: new work is refused
with the reason, outcomes wait in memory, and what was begun is tried again.
"""

import errno
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from spmd_tx.byte_sizes import parse_size, show_size
from spmd_tx.coordinator.runtime.metrics import DISK_FREE_BYTES, STORAGE_IS_PAUSED

logger = logging.getLogger(__name__)

ROOM_FOR_OLD_WORK = 0.5  # of what must be free for new work
SHORTEST_PAUSE, LONGEST_PAUSE = 0.2, 5.0  # seconds between attempts


class DiskGuard:
    """Of one server; told of every failure and success, and looked at before work is taken."""

    def __init__(self, directory: Path, min_free: str = "0") -> None:
        self._directory = directory
        self._min_free = min_free  # bytes, or a share of the disk
        self._shortage: str | None = None
        self._has_no_room = False  # even for what was begun
        self._outage: str | None = None
        self._failures = 0  # in a row

    @property
    def problem(self) -> str | None:
        """Why no new work can be taken now, for clients."""
        return self._outage or self._shortage

    @property
    def is_short(self) -> bool:
        return self._shortage is not None

    def measure(self) -> None:
        """Look how much room is left. Blocks."""
        try:
            usage = shutil.disk_usage(self._directory)
        except OSError as error:
            self._take_shortage(f"the server's disk cannot be reached ({error.strerror})")
            return
        floor = parse_size(self._min_free, usage.total)
        self._has_no_room = usage.free < floor * ROOM_FOR_OLD_WORK
        shortage = None
        if usage.free < floor:
            shortage = (
                f"the server's disk is almost full: {show_size(usage.free)} are free, and it takes new work "
                f"from {show_size(floor)} on; its operator must make room"
            )
        self._take_shortage(shortage)
        DISK_FREE_BYTES.set(usage.free)

    def _take_shortage(self, shortage: str | None) -> None:
        if shortage is not None and self._shortage is None:
            logger.error("%s (%s, --min-free-disk %s)", shortage, self._directory, self._min_free)
        elif shortage is None and self._shortage is not None:
            logger.warning("the disk has room again")
        self._shortage = shortage
        self._publish()

    def require_room(self) -> None:
        """Raise an OSError while nothing large should be written, not even for work that was begun."""
        if self._has_no_room:
            raise OSError(errno.ENOSPC, "too little room on the disk")

    def failed(self, error: BaseException) -> float:
        """Something could not be stored or read; how many seconds to wait before the next attempt."""
        if self._outage is None:
            logger.error("cannot store or read now, and try again until it works: %s", error, exc_info=error)
        self._failures += 1
        self._outage = "the server cannot store anything now; it goes on when its disk and database are back"
        self._publish()
        return min(SHORTEST_PAUSE * 2 ** min(self._failures - 1, 10), LONGEST_PAUSE)

    def succeeded(self) -> None:
        """Something was stored."""
        if self._outage is not None:
            logger.warning("stored again, after %d failed attempts", self._failures)
        self._outage, self._failures = None, 0
        self._publish()

    @property
    def outage(self) -> str | None:
        """Why not even results can be stored."""
        return self._outage

    def _publish(self) -> None:
        STORAGE_IS_PAUSED.set(self.problem is not None)


KINDS = (
    "payloads",
    "snapshots",
    "checkpoints",
    "versions",
    "routing",
    "stability",
    "compilation_cache",
    "idle_adapters",
)
DATABASE = "database"
OTHER = "other"


def by_kind(data_dir: Path) -> dict[str, int]:
    """Bytes by kind; hard links that are shared between folders count in each."""
    found: dict[str, int] = dict.fromkeys([*KINDS, DATABASE, OTHER], 0)
    for entry in _entries(data_dir):
        if entry.name.startswith("spmd_tx.db"):
            kind = DATABASE
        else:
            kind = entry.name if entry.name in KINDS else OTHER
        found[kind] += size_of(Path(entry.path))
    return found


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a folder; 0 of what has gone meanwhile."""
    try:
        if not path.is_dir():
            return path.stat().st_size
    except FileNotFoundError:
        return 0
    return sum(size_of(Path(entry.path)) for entry in _entries(path))


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except (FileNotFoundError, NotADirectoryError):
        return
