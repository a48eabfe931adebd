"""Remembers for some minutes, in memory, when requests reached their stages and for whom devices worked.

So a page that shows where the time of a run goes costs no query, however often it is asked for.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import NamedTuple

from spmd_tx.coordinator.requests.records import Failed, Request, RequestTimes
from spmd_tx.coordinator.runtime import clock
from spmd_tx.group_names import MAIN

KEPT_SECONDS = 900.0
MOST_REQUESTS = 40_000  # of all sessions; some 20 MB
SLICE_SECONDS = 5.0
ERROR_CHARACTERS = 500

RunLine = tuple[str, str]  # session, and model or sampler


class Timed(NamedTuple):
    """Holds a request with its times."""

    request: Request
    times: RequestTimes
    finished_at: float | None = None  # seconds since the epoch; None: unfinished
    tokens: int | None = None  # read and sampled; None: unfinished or failed
    failed: Failed | None = None  # with the beginning of a long error; None: unfinished or finished


@dataclass
class DeviceSlice:
    """Holds for how many seconds devices worked in SLICE_SECONDS, in all, in each group and for each line."""

    total: float = 0.0  # of known requests; groups of workers add up
    by_group: dict[str, float] = field(default_factory=dict)
    by_line: dict[RunLine, float] = field(default_factory=dict)  # lines may share a command


class RecentWork:
    """Holds the last KEPT_SECONDS, or less where there were too many requests."""

    def __init__(self) -> None:
        self._known_since = clock.now()
        self._ended: deque[tuple[float, Timed]] = deque()  # by the time of the end, oldest first
        self._slices: dict[int, DeviceSlice] = {}  # by their place in time, oldest first

    @property
    def known_since(self) -> float:
        """The time from which on everything is known, in seconds since the epoch."""
        return max(self._known_since, clock.now() - KEPT_SECONDS)

    def ended(self, ended: Timed) -> None:
        """Add a request that has its outcome."""
        assert ended.finished_at is not None
        at = ended.finished_at
        if ended.failed is not None:
            ended = ended._replace(failed=replace(ended.failed, error=_cut(ended.failed.error)))
        self._ended.append((at, ended))
        while len(self._ended) > MOST_REQUESTS or self._ended[0][0] < at - KEPT_SECONDS:
            self._known_since, _ = self._ended.popleft()

    def worked(self, lines: Collection[RunLine], seconds: float, group: str = MAIN) -> None:
        """Add a command that a group of workers has just carried out for these lines."""
        if not lines:
            return
        end = clock.now()
        begin = end - seconds
        for number in range(int(begin // SLICE_SECONDS), int(end // SLICE_SECONDS) + 1):
            start = number * SLICE_SECONDS
            part = min(end, start + SLICE_SECONDS) - max(begin, start)
            of_slice = self._slice(number)
            of_slice.total += part
            of_slice.by_group[group] = of_slice.by_group.get(group, 0.0) + part
            for line in lines:
                of_slice.by_line[line] = of_slice.by_line.get(line, 0.0) + part

    def ended_since(self, since: float) -> list[Timed]:
        """List what has ended since a time, oldest first."""
        newest_first = takewhile(lambda ended: ended[0] >= since, reversed(self._ended))
        return [timed for _, timed in newest_first][::-1]

    def devices(self, at: float) -> DeviceSlice:
        """Return what devices did in the slice that holds a time."""
        return self._slices.get(int(at // SLICE_SECONDS)) or DeviceSlice()

    def _slice(self, number: int) -> DeviceSlice:
        of_slice = self._slices.get(number)
        if of_slice is None:
            of_slice = self._slices[number] = DeviceSlice()
            while len(self._slices) > KEPT_SECONDS / SLICE_SECONDS:
                del self._slices[min(self._slices)]
        return of_slice


def _cut(error: str) -> str:
    return error if len(error) <= ERROR_CHARACTERS else f"{error[:ERROR_CHARACTERS]} …"
