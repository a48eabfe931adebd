"""Lists trajectories: those that a query selects, in an order, page by page. SQL only."""

import math
import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from spmd_tx.coordinator.storage.tables import TrajectoryRow
from spmd_tx.coordinator.tenancy.callers import Caller, is_seen
from spmd_tx.coordinator.wire.trajectories import NAME_CHARACTERS, TrajectorySort
from spmd_tx.errors import InvalidRequest

MOST_SHOWN = 80  # characters of a cursor or a name in a message
LIMIT = sys.float_info.max  # beyond all rewards
COLUMNS = {
    "created": TrajectoryRow.created_at,
    "used": TrajectoryRow.used_at,
    "name": TrajectoryRow.name,
    "turns": TrajectoryRow.turns,
    "size": TrajectoryRow.size_bytes,
    "reward": TrajectoryRow.reward,
}


class TrajectoryPlace(NamedTuple):
    """Names the last trajectory of a page: what it is ordered by, and its id."""

    value: float | str
    id: str


@dataclass(frozen=True)
class TrajectoryOrder:
    """Says in which order trajectories are listed. Those without a reward stand behind the others."""

    key: TrajectorySort = "created"
    is_ascending: bool = False

    @property
    def no_reward(self) -> float:
        """What stands for a reward that is not there."""
        return LIMIT if self.is_ascending else -LIMIT

    @property
    def column(self) -> ColumnElement[Any]:
        """What they are ordered by."""
        return func.coalesce(COLUMNS[self.key], self.no_reward) if self.key == "reward" else COLUMNS[self.key]

    def clauses(self) -> tuple[ColumnElement[Any], ColumnElement[Any]]:
        """Return what a query is ordered by."""
        if self.is_ascending:
            return self.column.asc(), TrajectoryRow.id.asc()
        return self.column.desc(), TrajectoryRow.id.desc()

    def behind(self, place: TrajectoryPlace) -> ColumnElement[bool]:
        """Select what stands behind a place."""
        is_behind = operator.gt if self.is_ascending else operator.lt
        is_later = (self.column == place.value) & is_behind(TrajectoryRow.id, place.id)
        return is_behind(self.column, place.value) | is_later

    def cursor(self, row: TrajectoryRow) -> str:
        """Return the cursor of the page behind a trajectory."""
        value = getattr(row, COLUMNS[self.key].key)
        return f"{self.no_reward if value is None else value}:{row.id}"

    def place(self, cursor: str) -> TrajectoryPlace:
        """Read a cursor of this order. Raises InvalidRequest."""
        text, _, id = cursor.partition(":")
        if self.key == "name":
            return TrajectoryPlace(text, id)
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise InvalidRequest(
                f"cursor is {cursor[:MOST_SHOWN]!r}; send one that the page before has given, with its sort"
            )
        return TrajectoryPlace(value, id)


NEWEST_FIRST = TrajectoryOrder()


@dataclass(frozen=True, kw_only=True)
class TrajectoryQuery:
    """Selects a page of trajectories."""

    name: str = ""  # what their names begin with
    search: str = ""  # what their names have in them, in upper or lower case
    state: str | None = None
    ids: Sequence[str] | None = None  # None: all
    order: TrajectoryOrder = NEWEST_FIRST
    after: TrajectoryPlace | None = None  # the last one of the page before
    most: int = 100


async def listed(db: AsyncSession, caller: Caller, query: TrajectoryQuery) -> Sequence[TrajectoryRow]:
    """Return one page of the trajectories that a caller may see. Raises InvalidRequest."""
    for field, part in ("name", query.name), ("search", query.search):
        if len(part) > NAME_CHARACTERS:
            raise InvalidRequest(
                f"{field} is {part[:MOST_SHOWN]!r}... of {len(part)} characters; names of trajectories have "
                f"at most {NAME_CHARACTERS}, so send a part of one"
            )
    rows = select(TrajectoryRow).where(is_seen(caller, TrajectoryRow.owner))
    if query.name:
        rows = rows.where(TrajectoryRow.name.startswith(query.name, autoescape=True))
    if query.search:
        rows = rows.where(TrajectoryRow.name.icontains(query.search, autoescape=True))
    if query.ids is not None:
        rows = rows.where(TrajectoryRow.id.in_(query.ids))
    if query.state is not None:
        ended = TrajectoryRow.finished_at
        rows = rows.where(ended.is_(None) if query.state == "open" else ended.is_not(None))
    if query.after is not None:
        rows = rows.where(query.order.behind(query.after))
    return (await db.scalars(rows.order_by(*query.order.clauses()).limit(query.most))).all()
