"""Whose turn it is: deficit round robin over tokens. Pure."""

from collections.abc import Collection, Mapping

MOST_OWED = 1 << 20  # tokens; nobody saves up more than this, or goes into debt further


class FairShares:
    """What each of those who wait is owed, in tokens. Whoever stops waiting is owed nothing any more."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = weights or {}  # 1 for those not named
        self._owed: dict[str, float] = {}
        self._last_turn: dict[str, int] = {}
        self._turns = 0

    def ranking(self, waiting: Collection[str]) -> list[str]:
        """Those who wait, the one to be served first in front; equals take turns."""
        self._owed = {name: self._owed.get(name, 0.0) for name in waiting}
        self._last_turn = {name: self._last_turn.get(name, 0) for name in waiting}
        return sorted(waiting, key=lambda name: (-self._owed[name], self._last_turn[name]))

    def charge(self, costs: Mapping[str, float]) -> None:
        """These have used so many tokens; everybody in the last ranking was entitled to a share of them."""
        total_weight = sum(self._weight(name) for name in self._owed)
        total = sum(costs.values())
        self._turns += 1
        for name in self._owed:
            if name in costs:
                self._last_turn[name] = self._turns
            earned = total * self._weight(name) / total_weight - costs.get(name, 0.0)
            self._owed[name] = max(-MOST_OWED, min(MOST_OWED, self._owed[name] + earned))

    def _weight(self, name: str) -> float:
        return self._weights.get(name, 1.0)
