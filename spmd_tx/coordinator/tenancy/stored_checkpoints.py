"""Records how long each checkpoint is on the disk, for the usage of storage.

It compares the table of checkpoints with its own, whoever changes them; exact to the time between two looks.
"""

from sqlalchemy import and_, delete, exists, insert, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from spmd_tx.coordinator.storage.tables import CheckpointRow, ModelRow, StoredCheckpoint
from spmd_tx.coordinator.tenancy.usage import KEPT_SECONDS

_SAME = and_(
    CheckpointRow.run_id == StoredCheckpoint.run_id,
    CheckpointRow.kind == StoredCheckpoint.kind,
    CheckpointRow.name == StoredCheckpoint.name,
    CheckpointRow.created_at == StoredCheckpoint.created_at,
)


async def look(db: AsyncSession, now: float) -> None:
    """Record checkpoints that are new, and those that are gone. ``now`` is in seconds since the epoch."""
    await db.execute(
        update(StoredCheckpoint)
        .where(StoredCheckpoint.deleted_at.is_(None), ~exists().where(_SAME))
        .values(deleted_at=now)
        .execution_options(synchronize_session=False)
    )
    names = ["run_id", "kind", "name", "owner", "size_bytes", "created_at"]
    columns = [getattr(CheckpointRow, name) for name in names]
    new = (
        select(*columns, ModelRow.session_id, ModelRow.base_model)
        .outerjoin(ModelRow, ModelRow.id == CheckpointRow.run_id)
        .where(~exists().where(_SAME))
    )
    await db.execute(insert(StoredCheckpoint).from_select([*names, "session_id", "base_model"], new))


async def forget(db: AsyncSession, now: float) -> None:
    await db.execute(delete(StoredCheckpoint).where(StoredCheckpoint.deleted_at < now - KEPT_SECONDS))
