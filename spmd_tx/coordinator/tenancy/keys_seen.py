"""Remembers, both beside the data and in the database, that there ever were API keys.

If the keys are lost with one of the two, the other still says that the server must not let everyone in.
"""

import asyncio
from pathlib import Path

from sqlalchemy import delete, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from spmd_tx.coordinator.storage.database import Database
from spmd_tx.coordinator.storage.tables import ApiKeyRow, ServerState
from spmd_tx.coordinator.tenancy import audit
from spmd_tx.durable_files import write_file

FILE = "keys_seen"  # in the data directory
TEXT = b"This server has had API keys. Without any it lets nobody in. See docs/keys.md.\n"


async def were_seen(db: AsyncSession, data_dir: Path) -> bool:
    """Whether there ever were keys, by either record."""
    if (data_dir / FILE).exists():
        return True
    return bool(await db.scalar(select(ServerState.had_keys)))


async def note(database: Database, data_dir: Path) -> None:
    """Remember that there are keys. Raises one of OUTAGES when that is impossible now."""
    async with database.transaction() as db:
        row = await db.get(ServerState, 1)
        if row is None:  # somebody has emptied every table of the database
            db.add(row := ServerState(id=1, generation=0))
        row.had_keys = True
    await asyncio.to_thread(write_file, data_dir / FILE, TEXT)


async def forget(db: AsyncSession, data_dir: Path) -> int:
    """Delete all keys, and the record that there were any. The result is the number of deleted keys."""
    removed = (await db.execute(delete(ApiKeyRow).returning(ApiKeyRow.id))).all()
    await db.execute(update(ServerState).values(had_keys=False))
    audit.add(
        db, audit.AuditEvent("keys_removed", audit.OPERATOR, audit.OPERATOR.owner, {"keys": len(removed)})
    )
    (data_dir / FILE).unlink(missing_ok=True)
    return len(removed)
