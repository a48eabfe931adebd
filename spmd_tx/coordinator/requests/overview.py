"""Lists, finds and gives up requests for an operator, also beside a running server."""

import re
from typing import NamedTuple

from sqlalchemy import ColumnElement, Select, and_, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from spmd_tx.coordinator.requests.records import CHANGES_STATE
from spmd_tx.coordinator.storage.tables import RequestRow, SessionRow
from spmd_tx.coordinator.tenancy import audit
from spmd_tx.errors import StartError

ID = re.compile("[0-9a-f]{1,32}")
BEHIND_ALL_IDS = "g"  # after any hexadecimal digit
MAX_REASON = 500  # characters
UNKNOWN_OWNER = "?"  # of a session that is not in the database any more


class Overview(NamedTuple):
    """Holds a request and its owner."""

    row: RequestRow
    owner: str

    @property
    def state(self) -> str:
        row = self.row
        if row.finished_at is None:
            return "unfinished" if row.given_up is None else "given up, not yet failed"
        if row.content_type is not None:
            return "finished" if row.never_again is None else "finished, its model given up"
        return "failed" if row.given_up is None else "given up"

    @property
    def may_be_run_again(self) -> bool:
        """Whether a restoration of its model runs it again."""
        return self.row.executed and self.row.kind in CHANGES_STATE


async def listed(
    db: AsyncSession, owner: str | None, kind: str | None, *, with_finished: bool = False, most: int = 100
) -> tuple[list[Overview], int]:
    """The oldest unfinished requests, or the newest of all; and how many there are without the bound."""
    conditions: list[ColumnElement[bool]] = []
    if not with_finished:
        conditions.append(RequestRow.finished_at.is_(None))
    if owner is not None:
        conditions.append(SessionRow.owner == owner)
    if kind is not None:
        conditions.append(RequestRow.kind == kind)
    order = RequestRow.number.desc() if with_finished else RequestRow.number
    overviews = await _overviews(db, _with_owner().where(*conditions).order_by(order).limit(most))
    count = select(func.count(RequestRow.number)).select_from(RequestRow)
    if owner is not None:
        count = count.outerjoin(SessionRow, SessionRow.id == RequestRow.session_id)
    return overviews, await db.scalar(count.where(*conditions)) or 0


async def suspects(db: AsyncSession, most: int) -> list[Overview]:
    """The unfinished requests that may have ended workers or the server, and those given up, newest first."""
    is_open = RequestRow.finished_at.is_(None)
    is_suspected = and_(is_open, or_(RequestRow.losses > 0, RequestRow.coordinator_losses > 0))
    is_given_up = RequestRow.given_up.is_not(None)
    overviews = list[Overview]()
    for condition in (is_suspected, is_given_up):
        query = _with_owner().where(condition).order_by(RequestRow.number.desc()).limit(most)
        overviews += await _overviews(db, query)
    unique = {each.row.number: each for each in overviews}
    return [unique[number] for number in sorted(unique, reverse=True)][:most]


async def find(db: AsyncSession, beginning: str) -> Overview:
    """The request whose id has this beginning. Raises StartError when there is none, or more than one."""
    matches: list[Overview] = []
    if ID.fullmatch(beginning):
        begins_so = RequestRow.id >= beginning, RequestRow.id < beginning + BEHIND_ALL_IDS
        matches = await _overviews(db, _with_owner().where(*begins_so).limit(2))
    if not matches:
        raise StartError(
            f"there is no request {beginning!r}; spmd-tx requests list --all shows the IDs, and what was "
            "finished long ago is not kept"
        )
    if len(matches) > 1:
        raise StartError(f"more than one request begins with {beginning!r}; give more of the ID")
    return matches[0]


async def with_id(db: AsyncSession, request_id: str) -> Overview | None:
    return next(iter(await _overviews(db, _with_owner().where(RequestRow.id == request_id))), None)


def _with_owner() -> "Select[RequestRow, str]":
    return select(RequestRow, SessionRow.owner).outerjoin(SessionRow, SessionRow.id == RequestRow.session_id)


async def _overviews(db: AsyncSession, query: "Select[RequestRow, str]") -> list[Overview]:
    return [Overview(row, owner or UNKNOWN_OWNER) for row, owner in await db.execute(query)]


async def give_up(db: AsyncSession, request: Overview, why: str) -> bool:
    """Ask the server to fail an unfinished request; False when it has just finished."""
    row = request.row
    is_open = RequestRow.number == row.number, RequestRow.finished_at.is_(None)
    change = update(RequestRow).where(*is_open).values(given_up=checked(why)).returning(RequestRow.number)
    if await db.scalar(change) is None:
        return False
    note(db, "request_given_up", request, reason=why)
    return True


async def refuse_model(db: AsyncSession, request: Overview, why: str) -> None:
    """Ask the server to refuse a finished request's model rather than run the request again to restore it."""
    row = request.row
    await db.execute(
        update(RequestRow).where(RequestRow.number == row.number).values(never_again=checked(why))
    )
    note(db, "request_never_again", request, reason=why, model_id=row.line)


def note(db: AsyncSession, event: str, request: Overview, **details: str) -> None:
    row = request.row
    what = {"request_id": row.id, "kind": row.kind, "session_id": row.session_id, **details}
    audit.add(db, audit.AuditEvent(event, audit.OPERATOR, request.owner, what))


def checked(why: str) -> str:
    """A reason as clients see it. Raises StartError for one that is too long or not printable."""
    if len(why) > MAX_REASON or not why.isprintable():
        raise StartError(f"--reason is {why[:40]!r}; use a line of at most {MAX_REASON} characters")
    return why
