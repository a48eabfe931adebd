"""Decides whose turn it is, by start-time fair queueing (Goyal, Vin and Cheng 1996) over seconds. Pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

MOST_OWED = 60.0  # seconds that a waiting name is behind or ahead of the others, at most
MOST_AWAY = 1024  # names that do not wait and whose use is remembered


@dataclass
class _Account:
    used: float  # seconds by weight, counted from the same moment for all names
    last_turn: int = 0


class FairShares:
    """Counts the seconds that names have used. The waiting name that has used least has its turn.

    A name that begins to wait saves up nothing: it starts at the level of those whom it joins. But what it
    has used beyond that level is remembered while it does not wait.
    """

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = weights or {}  # 1 for names without a weight
        self._accounts: dict[str, _Account] = {}
        self._waiting: frozenset[str] = frozenset()  # as of the last ranking
        self._level = 0.0  # what the last one served had used when its turn came
        self._turns = 0

    def ranking(self, waiting: Collection[str]) -> list[str]:
        """Return the waiting names in the order in which to serve them; equals take turns."""
        accounts = self._accounts
        if len(accounts) > len(waiting) + MOST_AWAY:
            accounts = self._accounts = {name: accounts[name] for name in waiting if name in accounts}
        staying = [accounts[name].used for name in waiting if name in self._waiting]
        if staying:
            self._level = min(max(self._level, min(staying)), max(staying))
        for name in waiting:
            account = self._account(name)
            least = self._level - MOST_OWED if name in self._waiting else self._level
            account.used = max(account.used, least)
        self._waiting = frozenset(waiting)
        return sorted(waiting, key=lambda name: (accounts[name].used, accounts[name].last_turn))

    def owed(self, name: str) -> float:
        """Return how much less a waiting name has used than all others that wait, in seconds by weight."""
        others = [self._accounts[other].used for other in self._waiting if other != name]
        return min(others) - self._accounts[name].used if others else 0.0

    def charge(self, costs: Mapping[str, float]) -> None:
        """Charge names for the seconds that they use in a turn."""
        if not costs:
            return
        accounts = [self._account(name) for name in costs]
        self._level = max(self._level, min(account.used for account in accounts))
        self._turns += 1
        for account in accounts:
            account.last_turn = self._turns
        self.correct(costs)

    def correct(self, costs: Mapping[str, float]) -> None:
        """Charge names for seconds that an earlier turn took longer than it was charged for, or less."""
        for name, cost in costs.items():
            account = self._account(name)
            used = account.used + cost / self._weights.get(name, 1.0)
            account.used = min(used, self._level + MOST_OWED)

    def _account(self, name: str) -> _Account:
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = _Account(self._level)
        return account
