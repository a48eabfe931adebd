"""The audit log: who did what to what, and when. Rows are added in the transaction of the deed itself."""

from collections.abc import Sequence
from datetime import UTC, date, datetime, time
from typing import Any, NamedTuple

from sqlalchemy import delete, orm, select
from sqlalchemy.ext.asyncio import AsyncSession

from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.storage.database import Database
from spmd_tx.coordinator.storage.tables import AuditRow, Session
from spmd_tx.coordinator.tenancy.callers import Caller

OPERATOR = Caller("operator", "admin")  # whoever runs spmd-tx on the server's host

DAY_SECONDS = 24 * 3600.0
MOST_ENTRIES = 10_000  # of one answer, the newest

# What can be asked for, in the words of the SDK, and how the names of its events begin.
RESOURCES = {"checkpoints": "checkpoint", "projects": "project", "teams": "team", "organizations": "key"}


class AuditQuery(NamedTuple):
    """Which entries are wanted."""

    event_type: str  # "all", or one of RESOURCES
    day: date  # UTC


class AuditEvent(NamedTuple):
    """What somebody does to what belongs to an owner."""

    event: str  # RESOURCE_ACTION
    caller: Caller
    owner: str
    details: dict[str, Any]


def add(db: AsyncSession | orm.Session, deed: AuditEvent) -> None:
    """Write a deed down together with what it changes."""
    who = {"actor": deed.caller.owner, "key_id": deed.caller.key_id, "owner": deed.owner}
    db.add(AuditRow(at=clock.now(), event=deed.event, details=deed.details, **who))


async def note(database: Database, deed: AuditEvent) -> None:
    """Write a deed down that has been done."""
    async with database.transaction() as db:
        add(db, deed)


def add_by_session(db: orm.Session, event: str, session_id: str, tinker_path: str) -> None:
    """A request of a session has saved or loaded a checkpoint."""
    session = db.get(Session, session_id)
    if session is not None:
        caller = Caller(session.owner, "user", session.key_id)
        details = {"session_id": session_id, "tinker_path": tinker_path}
        add(db, AuditEvent(event, caller, session.owner, details))


async def entries(db: AsyncSession, question: AuditQuery, caller: Caller) -> Sequence[AuditRow]:
    """What a caller may know of, oldest first: admins everything, others what was done to what is theirs."""
    query = select(AuditRow).order_by(AuditRow.number.desc()).limit(MOST_ENTRIES)
    if caller.role != "admin":
        query = query.where(AuditRow.owner == caller.owner)
    if question.event_type != "all":
        query = query.where(AuditRow.event.startswith(RESOURCES[question.event_type] + "_", autoescape=True))
    begin = datetime.combine(question.day, time(), UTC).timestamp()
    query = query.where(AuditRow.at >= begin, AuditRow.at < begin + DAY_SECONDS)
    return (await db.scalars(query)).all()[::-1]


async def forget(db: AsyncSession, before: float) -> None:
    await db.execute(delete(AuditRow).where(AuditRow.at < before))
