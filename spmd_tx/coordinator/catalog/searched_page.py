"""One page of a search: it ends with its entries, with its bytes, or when its time is over."""

import time
from typing import Generic, TypeVar

import msgspec

from spmd_tx.bounds import Bounds
from spmd_tx.coordinator.wire.page_room import PageRoom

Candidate = TypeVar("Candidate")


class SearchedPage(Generic[Candidate]):
    """Gathers what is wanted among candidates, in their order."""

    def __init__(self, limit: int, bounds: Bounds) -> None:
        self.found: list[Candidate] = []
        self.last: Candidate | None = None  # behind which the next page begins; None: there is none
        self._limit = limit
        self._room = PageRoom(bounds.answer_bytes)
        self._end = time.monotonic() + bounds.search_seconds
        self._looked_at: Candidate | None = None

    def look_at(self, candidate: Candidate, entry: msgspec.Struct | None) -> bool:
        """Take a candidate if it has an entry, and if that fits; return whether the search goes on."""
        is_over = self._looked_at is not None and time.monotonic() > self._end
        if is_over or (entry is not None and not self._fits(entry)):
            self.last = self._looked_at
            return False
        if entry is not None:
            self.found.append(candidate)
        self._looked_at = candidate
        return True

    def _fits(self, entry: msgspec.Struct) -> bool:
        return len(self.found) < self._limit and self._room.takes(entry)
