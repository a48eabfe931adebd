"""How far the requests of each model are numbered, so that no number runs far ahead of the others.

A line waits for missing numbers, remembers those that were refused, and its place is kept for ever: none of
that should depend on a number that a client has made up.
"""

from collections import OrderedDict

from spmd_tx.coordinator.requests import rows
from spmd_tx.coordinator.storage.database import Database

MOST_LINES = 100_000  # whose highest numbers are held in memory; of others they are read again


class LineNumbers:
    """Of all models. Each line is looked up once, however many requests it has."""

    def __init__(self, database: Database, most_ahead: int) -> None:
        self._database = database
        self._most_ahead = most_ahead
        self._highest: OrderedDict[str, int] = OrderedDict()  # the line that was used last is last

    async def problem(self, line: str, seq_id: int) -> str | None:
        """Why a request cannot have this number, if so; else it counts as used."""
        if line not in self._highest:
            async with self._database.reading() as db:
                stored = await rows.highest_number(db, line)
            self._highest.setdefault(line, stored)
        highest = self._highest[line]
        if seq_id > highest + self._most_ahead:
            return (
                f"seq_id is {seq_id}, and {line} has got up to {highest}; a request may be at most "
                f"{self._most_ahead} ahead, so number the next one {highest + 1}, or ask the operator to "
                "raise the limit seq_ids_ahead"
            )
        self._highest[line] = max(highest, seq_id)
        self._highest.move_to_end(line)
        while len(self._highest) > MOST_LINES:
            self._highest.popitem(last=False)
        return None
