"""Requests that may be why the coordinator itself ended: they are counted at its next start, and given up.

A process that freezes, crashes or runs out of memory cannot say why. The marks of what it was at work on
(at_work.py) are what is left. One end may be chance; so a request is given up after the second, and until
then nothing else is at work beside it.
"""

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from spmd_tx.coordinator.requests import loss_counts
from spmd_tx.coordinator.requests.records import Failed
from spmd_tx.coordinator.runtime.at_work import AtWork
from spmd_tx.coordinator.storage.database import Database

logger = logging.getLogger(__name__)

MOST_ENDS = 2  # of the server, while it was at work on a request
FILE = "at_work"


@dataclass
class Quarantine:
    """How often the coordinator has ended at work on requests, and its marks of now."""

    at_work: AtWork = field(default_factory=AtWork)
    ends: Mapping[str, int] = field(default_factory=dict)  # by request

    def verdict(self, request_id: str) -> Failed | None:
        """Why a request is not begun any more."""
        if self.ends.get(request_id, 0) < MOST_ENDS:
            return None
        return Failed(
            f"the server ended {_times(self.ends[request_id])} while it was at work on this request; "
            "it is given up",
            "server",
        )

    def beyond_repair(self) -> dict[str, str]:
        """Of those that cannot be run again, why."""
        return {
            request_id: f"the model cannot be restored: the server ended {_times(times)} while it was at "
            f"work on request {request_id}"
            for request_id, times in self.ends.items()
            if times >= MOST_ENDS
        }

    def watch(self, request_ids: Iterable[str]) -> None:
        """These are about to be carried out: with a suspect among them, everything is done one by one."""
        self.at_work.suspects.clear()
        self.at_work.suspects.update(id for id in request_ids if 0 < self.ends.get(id, 0) < MOST_ENDS)


async def open_quarantine(database: Database, data_dir: Path) -> Quarantine:
    """Count what the marks of the last process tell; they are gone then."""
    at_work = await asyncio.to_thread(AtWork, data_dir / FILE)
    async with database.transaction() as db:
        ends = await loss_counts.count_ends(db, at_work.left_behind)
    for request_id in at_work.left_behind & ends.keys():
        times = _times(ends[request_id])
        logger.error("the server ended while it was at work on request %s, %s by now", request_id, times)
    return Quarantine(at_work, ends)


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")
