"""Decides whose turn it is, by deficit round robin over tokens. Pure."""

from collections.abc import Collection, Mapping

MAX_DEFICIT = 1 << 20  # tokens; bounds what one name saves up, and its debt


class FairShares:
    """Tracks the deficit of each waiting name, in tokens. A name that stops waiting loses its deficit."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = weights or {}  # 1 for names without a weight
        self._deficits: dict[str, float] = {}
        self._last_turn: dict[str, int] = {}
        self._turns = 0

    def ranking(self, waiting: Collection[str]) -> list[str]:
        """The waiting names in the order in which to serve them; equals take turns."""
        self._deficits = {name: self._deficits.get(name, 0.0) for name in waiting}
        self._last_turn = {name: self._last_turn.get(name, 0) for name in waiting}
        return sorted(waiting, key=lambda name: (-self._deficits[name], self._last_turn[name]))

    def charge(self, costs: Mapping[str, float]) -> None:
        """Charge names for the tokens they have used, and credit every name of the last ranking its share."""
        total_weight = sum(self._weight(name) for name in self._deficits)
        total = sum(costs.values())
        self._turns += 1
        for name in self._deficits:
            if name in costs:
                self._last_turn[name] = self._turns
            earned = total * self._weight(name) / total_weight - costs.get(name, 0.0)
            self._deficits[name] = max(-MAX_DEFICIT, min(MAX_DEFICIT, self._deficits[name] + earned))

    def _weight(self, name: str) -> float:
        return self._weights.get(name, 1.0)
