"""Bounds how far a request's number may run ahead of the others of its model.

A line waits for missing numbers, and remembers refused ones for ever: neither must depend on a number that a
client has made up.
"""

from collections import OrderedDict

from spmd_tx.coordinator.requests import rows
from spmd_tx.coordinator.storage.database import Database

MAX_LINES = 100_000  # whose highest numbers are held in memory; others are read again


class LineNumbers:
    """Knows the highest number of each line, which it looks up once."""

    def __init__(self, database: Database, most_ahead: int) -> None:
        self._database = database
        self._most_ahead = most_ahead
        self._highest: OrderedDict[str, int] = OrderedDict()  # the line that was used last is last

    async def problem(self, line: str, seq_id: int) -> str | None:
        """Why a request cannot have this number; None if it can, and the number counts as used then."""
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
        while len(self._highest) > MAX_LINES:
            self._highest.popitem(last=False)
        return None
