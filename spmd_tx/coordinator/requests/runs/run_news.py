"""Remembers in memory which training runs have new metrics, so that open consoles need not ask the database.

Everybody who listens is told at the same moments. So consoles ask at the same time for what is new, and one
answer serves all of them.
"""

import time
from collections import deque

SECONDS = 2.0  # between two times at which news is told
KEPT = 60  # news that a slow listener can still get
MOST_RUNS = 10_000  # that have changed while nobody listened

Changed = dict[str, int | None]  # runs, each with the first step that a client has added to


class RunNews:
    """Gathers changes, and counts the times at which they were told."""

    def __init__(self) -> None:
        self.told = 0
        self._fresh: Changed = {}
        self._news: deque[tuple[int, Changed]] = deque(maxlen=KEPT)
        self._told_at = float("-inf")

    def add(self, run: str, step: int | None = None) -> None:
        """Note that a run has a new row; ``step`` is the one that a client has named."""
        if len(self._fresh) >= MOST_RUNS:
            self._fresh.clear()
        _note(self._fresh, run, step)

    def seconds_left(self) -> float:
        """How long to wait for more news."""
        return max(0.0, self._told_at + SECONDS - time.monotonic())

    def since(self, number: int) -> Changed | None:
        """Return what was told beyond a number of ``told``; None: it is no longer known."""
        if not self.seconds_left():
            self.told += 1
            self._told_at = time.monotonic()
            self._news.append((self.told, self._fresh))
            self._fresh = {}
        if self.told - number > KEPT:
            return None
        found: Changed = {}
        for at, changed in self._news:
            if at > number:
                for run, step in changed.items():
                    _note(found, run, step)
        return found


def _note(changed: Changed, run: str, step: int | None) -> None:
    steps = [each for each in (changed.get(run), step) if each is not None]
    changed[run] = min(steps, default=None)
