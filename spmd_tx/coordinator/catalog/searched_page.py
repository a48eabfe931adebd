"""One page of a search, newest first: it ends with its entries, with its bytes, or when its time is over."""

import time
from collections.abc import AsyncGenerator
from typing import Any, Generic, TypeVar

import msgspec
from sqlalchemy import ColumnElement, Select, and_, or_, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute

from spmd_tx.bounds import Bounds
from spmd_tx.coordinator.storage.tables import CheckpointRow, SessionRow
from spmd_tx.coordinator.tenancy.callers import Caller
from spmd_tx.coordinator.wire.moments import read_moment
from spmd_tx.coordinator.wire.page_room import PageRoom
from spmd_tx.coordinator.wire.sessions import OwnSearchOwner, SearchOwner, UserSearchOwner

ROWS_AT_ONCE = 50  # with metadata of 64 KiB each
ROUNDING_SECONDS = 1e-5  # more than a time loses on its way to a client and back

Candidate = TypeVar("Candidate", SessionRow, CheckpointRow)


class SearchedPage(Generic[Candidate]):
    """Gathers what is wanted among candidates, in their order."""

    def __init__(self, limit: int, bounds: Bounds) -> None:
        self.matches: list[Candidate] = []
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
            self.matches.append(candidate)
        self._looked_at = candidate
        return True

    def _fits(self, entry: msgspec.Struct) -> bool:
        return len(self.matches) < self._limit and self._room.takes(entry)


def of_owner(
    owner: SearchOwner, column: InstrumentedAttribute[str], caller: Caller
) -> list[ColumnElement[bool]]:
    """Return the conditions by which a search selects owners."""
    if isinstance(owner, OwnSearchOwner):
        return [column == caller.owner]
    return [column.in_(owner.owner_urns)] if isinstance(owner, UserSearchOwner) else []


async def newest_first(
    db: AsyncSession,
    query: Select[Candidate],
    table: type[Candidate],
    key: InstrumentedAttribute[Any],
    cursor: tuple[str, int | str] | None,
) -> AsyncGenerator[Candidate]:
    """Yield a query's rows, newest first, ``key`` deciding among equals.

    ``cursor`` has the time, exact if the row is there, and the key of the row behind which to begin.
    """
    query = query.order_by(table.created_at.desc(), key.desc()).limit(ROWS_AT_ONCE)
    behind = query
    if cursor is not None:
        created_at, last_key = read_moment("cursor.last_created_at", cursor[0]).timestamp(), cursor[1]
        exact = await db.scalar(select(table.created_at).where(key == last_key))
        if exact is not None and abs(exact - created_at) < ROUNDING_SECONDS:
            created_at = exact
        behind = query.where(_is_behind(table, key, created_at, last_key))
    while True:
        rows = (await db.scalars(behind)).all()
        for row in rows:
            yield row
        if len(rows) < ROWS_AT_ONCE:
            return
        behind = query.where(_is_behind(table, key, rows[-1].created_at, getattr(rows[-1], key.key)))


def _is_behind(
    table: type[Candidate], key: InstrumentedAttribute[Any], created_at: float, last_key: int | str
) -> ColumnElement[bool]:
    is_earlier = table.created_at < created_at
    return or_(is_earlier, and_(table.created_at == created_at, key < last_key))
