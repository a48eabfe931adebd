"""Says whether work can be stored now, and how many bytes the data directory holds of each kind.

The loss of a disk or a database is not an error of a request. Work pauses until they are back: new work is
refused with the reason, outcomes wait in memory, and work that was begun is tried again.
"""

import errno
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from spmd_tx.byte_sizes import parse_size, show_size
from spmd_tx.coordinator.runtime.metrics import DISK_FREE_BYTES, STORAGE_IS_PAUSED
from spmd_tx.group_names import GROUPS_FOLDER

logger = logging.getLogger(__name__)

SHARE_FOR_BEGUN_WORK = 0.5  # of the free space that new work needs
SHORTEST_PAUSE, LONGEST_PAUSE = 0.2, 5.0  # seconds between attempts

KINDS = (
    "payloads",
    "snapshots",
    "checkpoints",
    "uploads",
    "versions",
    "routing",
    "stability",
    "compilation_cache",
    "idle_adapters",
    "kernel_choices",
    GROUPS_FOLDER,
)
DATABASE = "database"
OTHER = "other"


class DiskGuard:
    """Decides whether new work can be stored, from the free space and the last failures and successes."""

    def __init__(self, directory: Path, min_free: str = "0") -> None:
        self.outage: str | None = None  # why not even results can be stored
        self.free_bytes: int | None = None  # None: not measured
        self.bytes_by_kind: dict[str, int] = {}  # in the data directory; empty: not measured
        self._directory = directory
        self._min_free = min_free  # bytes, or a share of the disk
        self._shortage: str | None = None
        self._is_full = False  # even for work that was begun
        self._failures = 0  # in a row

    @property
    def problem(self) -> str | None:
        """Why no new work is accepted now, in words for clients."""
        return self.outage or self._shortage

    @property
    def is_short(self) -> bool:
        return self._shortage is not None

    def measure(self) -> None:
        """Measure the free space. Blocks."""
        try:
            usage = shutil.disk_usage(self._directory)
        except OSError as error:
            self._set_shortage(f"the server's disk cannot be reached ({error.strerror})")
            return
        floor = parse_size(self._min_free, usage.total)
        self._is_full = usage.free < floor * SHARE_FOR_BEGUN_WORK
        shortage = None
        if usage.free < floor:
            shortage = (
                f"the server's disk is almost full: {show_size(usage.free)} are free, and it takes new work "
                f"from {show_size(floor)} on; its operator must make room"
            )
        self._set_shortage(shortage)
        self.free_bytes = usage.free
        DISK_FREE_BYTES.set(usage.free)

    def require_space(self) -> None:
        """Raise an OSError while nothing large should be written, not even for work that was begun."""
        if self._is_full:
            raise OSError(errno.ENOSPC, "too little space on the disk")

    def failed(self, error: BaseException) -> float:
        """Note that storing or reading failed. The result is the seconds to wait before the next attempt."""
        if self.outage is None:
            logger.error("cannot store or read now; trying again until it works: %s", error, exc_info=error)
        self._failures += 1
        self.outage = "the server cannot store anything now; it goes on when its disk and database are back"
        self._publish()
        return min(SHORTEST_PAUSE * 2 ** min(self._failures - 1, 10), LONGEST_PAUSE)

    def succeeded(self) -> None:
        """Note that something was stored."""
        if self.outage is not None:
            logger.warning("stored again, after %d failed attempts", self._failures)
        self.outage, self._failures = None, 0
        self._publish()

    def _set_shortage(self, shortage: str | None) -> None:
        if shortage is not None and self._shortage is None:
            logger.error("%s (%s, --min-free-disk %s)", shortage, self._directory, self._min_free)
        elif shortage is None and self._shortage is not None:
            logger.warning("the disk has space again")
        self._shortage = shortage
        self._publish()

    def _publish(self) -> None:
        STORAGE_IS_PAUSED.set(self.problem is not None)


def by_kind(data_dir: Path) -> dict[str, int]:
    """The bytes in the data directory by kind; hard links shared between folders count in each."""
    sizes: dict[str, int] = dict.fromkeys([*KINDS, DATABASE, OTHER], 0)
    for entry in _entries(data_dir):
        if entry.name.startswith("spmd_tx.db"):
            kind = DATABASE
        else:
            kind = entry.name if entry.name in KINDS else OTHER
        sizes[kind] += size_of(Path(entry.path))
    return sizes


def size_of(path: Path) -> int:
    """The bytes of a file, or of all files in a folder; 0 for one that is gone by now."""
    try:
        if not path.is_dir():
            return path.stat().st_size
    except FileNotFoundError:
        return 0
    return sum(size_of(Path(entry.path)) for entry in _entries(path))


def modified_at(path: Path) -> float:
    """When a file, or the names in a folder, were changed last; 0 for one that is gone by now."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except (FileNotFoundError, NotADirectoryError):
        return
