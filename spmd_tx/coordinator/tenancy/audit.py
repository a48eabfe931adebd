"""The audit log: who did what to what, and when. An event's row joins the transaction of the event itself."""

from collections.abc import AsyncGenerator, Sequence
from datetime import UTC, date, datetime, time
from typing import Any, NamedTuple

from sqlalchemy import Row, delete, orm, select
from sqlalchemy.ext.asyncio import AsyncSession

from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.storage.database import Database
from spmd_tx.coordinator.storage.row_pieces import in_pieces
from spmd_tx.coordinator.storage.tables import AuditRow, SessionRow
from spmd_tx.coordinator.tenancy.callers import Caller

OPERATOR = Caller("operator", "admin")  # whoever runs spmd-tx on the server's host

DAY_SECONDS = 24 * 3600.0
MOST_ENTRIES = 10_000  # of one answer, the newest
ROWS_AT_ONCE = 500

# The SDK's words for what can be asked for, and the prefixes of the matching events.
RESOURCES = {"checkpoints": "checkpoint", "projects": "project", "teams": "team", "organizations": "key"}


class AuditQuery(NamedTuple):
    """Selects entries of the audit log."""

    event_type: str  # "all", or one of RESOURCES
    day: date  # UTC
    before: int | None = None  # number of an entry, which is newer than these; None: the newest


class AuditEvent(NamedTuple):
    """Records what a caller does to something that belongs to an owner."""

    name: str  # RESOURCE_ACTION
    caller: Caller
    owner: str
    details: dict[str, Any]


def add(db: AsyncSession | orm.Session, event: AuditEvent) -> None:
    """Add an event in the transaction of what it changes."""
    who = {"actor": event.caller.owner, "key_id": event.caller.key_id, "owner": event.owner}
    db.add(AuditRow(at=clock.now(), event=event.name, details=event.details, **who))


async def note(database: Database, event: AuditEvent) -> None:
    """Add an event that has already happened, in a transaction of its own."""
    async with database.transaction() as db:
        add(db, event)


def add_by_session(db: orm.Session, name: str, session_id: str, tinker_path: str) -> None:
    """Add the event that a request of a session has saved or loaded a checkpoint."""
    session = db.get(SessionRow, session_id)
    if session is not None:
        caller = Caller(session.owner, "user", session.key_id)
        details = {"session_id": session_id, "tinker_path": tinker_path}
        add(db, AuditEvent(name, caller, session.owner, details))


def entries(db: AsyncSession, query: AuditQuery, caller: Caller) -> AsyncGenerator[Sequence[Row[AuditRow]]]:
    """Yield the entries that a caller may see, newest first: admins all, others those about what they own."""
    rows = select(AuditRow).order_by(AuditRow.number.desc())
    if caller.role != "admin":
        rows = rows.where(AuditRow.owner == caller.owner)
    if query.event_type != "all":
        rows = rows.where(AuditRow.event.startswith(RESOURCES[query.event_type] + "_", autoescape=True))
    if query.before is not None:
        rows = rows.where(AuditRow.number < query.before)
    begin = datetime.combine(query.day, time(), UTC).timestamp()
    rows = rows.where(AuditRow.at >= begin, AuditRow.at < begin + DAY_SECONDS)
    return in_pieces(db, rows.limit(MOST_ENTRIES + 1), ROWS_AT_ONCE)


async def forget(db: AsyncSession, before: float) -> None:
    await db.execute(delete(AuditRow).where(AuditRow.at < before))
