"""Whose custom loss is worked on next: sessions get equal shares of the time that losses take. Pure."""

from collections import OrderedDict
from collections.abc import Collection

MOST_REMEMBERED = 1000  # sessions


class LossTurns:
    """Runs of losses, each of a session. Those of a session take turns, and so do sessions."""

    def __init__(self) -> None:
        self._runs: OrderedDict[int, str] = OrderedDict()  # the one that had its turn last at the end
        self._spent: OrderedDict[str, float] = OrderedDict()  # seconds, by session

    def add(self, run: int, session: str) -> None:
        """Who comes has spent no less than the most patient of those who wait: nobody saves up time."""
        waiting = set(self._runs.values())
        if session not in waiting:
            least = min((self._spent[each] for each in waiting), default=0.0)
            self._spent[session] = max(self._spent.get(session, 0.0), least)
            self._spent.move_to_end(session)
        self._runs[run] = session
        self._forget(waiting | {session})

    def drop(self, run: int) -> None:
        self._runs.pop(run, None)

    def next(self, busy: Collection[str]) -> int | None:
        """The run whose turn it is; none of a session that is busy, because one at a time is its share."""
        waiting = [run for run, session in self._runs.items() if session not in busy]
        return min(waiting, key=lambda run: self._spent[self._runs[run]], default=None)

    def had_its_turn(self, run: int) -> None:
        self._runs.move_to_end(run)

    def charge(self, session: str, seconds: float) -> None:
        """Time that was spent on a run of this session, whatever came of it."""
        self._spent[session] = self._spent.get(session, 0.0) + seconds

    def _forget(self, needed: Collection[str]) -> None:
        for session in list(self._spent)[: max(0, len(self._spent) - MOST_REMEMBERED)]:
            if session not in needed:
                del self._spent[session]
