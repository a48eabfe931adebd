"""Remembers in memory which training runs have new metrics, so that open consoles need not ask the database.

Everybody who listens is told at the same moments. So consoles ask at the same time for what is new, and one
answer serves all of them.
"""

import time

SECONDS = 2.0  # between two times at which news is told
MOST_RUNS = 10_000  # that have changed while nobody listened


class RunNews:
    """Gathers changes, and counts the times at which they were told."""

    def __init__(self) -> None:
        self.told = 0
        self._fresh: set[str] = set()
        self._told_at = float("-inf")

    def add(self, run: str) -> None:
        """Note that a run has a new row."""
        if len(self._fresh) >= MOST_RUNS:
            self._fresh.clear()
        self._fresh.add(run)

    def seconds_left(self) -> float:
        """Return how long to wait for more news."""
        return max(0.0, self._told_at + SECONDS - time.monotonic())

    def tell(self) -> set[str]:
        """Return the runs that have changed since the last time; none while there are seconds left."""
        if self.seconds_left():
            return set()
        changed, self._fresh = self._fresh, set()
        self.told += 1
        self._told_at = time.monotonic()
        return changed
