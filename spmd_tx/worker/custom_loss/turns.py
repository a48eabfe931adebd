"""Chooses the custom loss to work on next: tenants get equal shares of the time. Pure."""

from collections import OrderedDict
from collections.abc import Collection

MOST_REMEMBERED = 1000  # tenants


class LossTurns:
    """Schedules runs of losses: the runs of a tenant take turns, and so do tenants."""

    def __init__(self) -> None:
        self._runs: OrderedDict[int, str] = OrderedDict()  # least recently scheduled first
        self._spent: OrderedDict[str, float] = OrderedDict()  # seconds, by tenant

    def add(self, run: int, tenant: str) -> None:
        """Add a run. A new tenant starts with at least the least time that a waiting one has spent."""
        waiting = set(self._runs.values())
        if tenant not in waiting:
            least = min((self._spent[each] for each in waiting), default=0.0)
            self._spent[tenant] = max(self._spent.get(tenant, 0.0), least)
            self._spent.move_to_end(tenant)
        self._runs[run] = tenant
        self._forget(waiting | {tenant})

    def drop(self, run: int) -> None:
        self._runs.pop(run, None)

    def next(self, busy: Collection[str]) -> int | None:
        """Return the run whose turn it is. Busy tenants are skipped: each gets one run at a time."""
        waiting = [run for run, tenant in self._runs.items() if tenant not in busy]
        return min(waiting, key=lambda run: self._spent[self._runs[run]], default=None)

    def had_its_turn(self, run: int) -> None:
        self._runs.move_to_end(run)

    def charge(self, tenant: str, seconds: float) -> None:
        """Count seconds spent on a run of this tenant, whatever its outcome."""
        self._spent[tenant] = self._spent.get(tenant, 0.0) + seconds

    def _forget(self, needed: Collection[str]) -> None:
        for tenant in list(self._spent)[: max(0, len(self._spent) - MOST_REMEMBERED)]:
            if tenant not in needed:
                del self._spent[tenant]
