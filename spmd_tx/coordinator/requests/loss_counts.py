"""Counts in the log how often workers, or the server, ended while they worked on a request."""

from collections.abc import Collection

from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from spmd_tx.coordinator.requests.records import LossCount
from spmd_tx.coordinator.storage.tables import RequestRow


async def count_losses(
    db: AsyncSession, in_flight: Collection[str], blamed: Collection[str]
) -> dict[str, LossCount]:
    """Count one more lost generation for the requests whose commands were out; their counts by now."""
    is_in_flight = RequestRow.id.in_(list(in_flight))
    await db.execute(update(RequestRow).where(is_in_flight).values(losses=RequestRow.losses + 1))
    one_more = RequestRow.losses_by_command + 1
    await db.execute(
        update(RequestRow).where(RequestRow.id.in_(list(blamed))).values(losses_by_command=one_more)
    )
    columns = (RequestRow.id, RequestRow.losses, RequestRow.losses_by_command)
    rows = await db.execute(select(*columns).where(is_in_flight))
    return {id: LossCount(total, by_command) for id, total, by_command in rows}


async def count_ends(db: AsyncSession, at_work: Collection[str]) -> dict[str, int]:
    """Count one more end of the coordinator for the requests it worked on; all such counts by now."""
    counted, is_one = RequestRow.coordinator_losses, RequestRow.id.in_(list(at_work))
    is_needed = RequestRow.finished_at.is_(None) | RequestRow.executed
    await db.execute(update(RequestRow).where(is_one, is_needed).values(coordinator_losses=counted + 1))
    rows = await db.execute(select(RequestRow.id, counted).where(counted > 0, is_needed))
    return {row.id: row.coordinator_losses for row in rows}
