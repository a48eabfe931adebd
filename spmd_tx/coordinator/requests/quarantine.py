"""Gives up requests that may have ended the coordinator itself.

A process that freezes, crashes or runs out of memory cannot say why; only its marks of the requests it worked
on are left (runtime/at_work.py), and the next start counts them. One end may be chance: a request is given up
after the second, and until then it runs alone.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from spmd_tx.coordinator.requests import loss_counts
from spmd_tx.coordinator.requests.records import Failed
from spmd_tx.coordinator.runtime.at_work import AtWork
from spmd_tx.coordinator.storage.database import Database

logger = logging.getLogger(__name__)

MAX_ENDS = 2  # of the server at work on a request, after which the request is given up
FILE = "at_work"


@dataclass
class Quarantine:
    """Knows how often the coordinator has ended at work on requests, and marks its present work."""

    at_work: AtWork = field(default_factory=AtWork)
    ends: Mapping[str, int] = field(default_factory=dict)  # by request
    _watched: list[Callable[[], bool]] = field(default_factory=list)

    def verdict(self, request_id: str) -> Failed | None:
        """The outcome of a request that is given up; None: it may run."""
        if self.ends.get(request_id, 0) < MAX_ENDS:
            return None
        return Failed(
            f"the server ended {_times(self.ends[request_id])} while it was working on this request; "
            "it is given up",
            "server",
        )

    def beyond_repair(self) -> dict[str, str]:
        """Why models cannot be restored, by the request that cannot be run again."""
        return {
            request_id: f"the model cannot be restored: the server ended {_times(times)} while it was at "
            f"work on request {request_id}"
            for request_id, times in self.ends.items()
            if times >= MAX_ENDS
        }

    def watch(self, is_careful: Callable[[], bool]) -> None:
        """Have all be careful while this says so: a request that may end this process is unfinished."""
        self._watched.append(is_careful)

    def is_careful(self) -> bool:
        """Whether nothing may compute beside a request that may end this process."""
        return any(is_careful() for is_careful in self._watched)

    def is_suspect(self, request_id: str) -> bool:
        """Whether a request may end this process, and runs alone."""
        return 0 < self.ends.get(request_id, 0) < MAX_ENDS


async def open_quarantine(database: Database, data_dir: Path) -> Quarantine:
    """Count and clear the marks that the last process has left."""
    at_work = await asyncio.to_thread(AtWork, data_dir / FILE)
    async with database.transaction() as db:
        ends = await loss_counts.count_ends(db, at_work.left_behind)
    for request_id in at_work.left_behind & ends.keys():
        times = _times(ends[request_id])
        logger.error("the server ended while it was working on request %s, %s by now", request_id, times)
    return Quarantine(at_work, ends)


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")
