"""Does what is due from time to time: checks the disk, ends silent sessions, deletes what is old."""

import asyncio
import logging
from typing import NoReturn

from spmd_tx.coordinator.http.services import Services
from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.runtime.containment import report
from spmd_tx.coordinator.runtime.metrics import DISK_BYTES, UNFINISHED_REQUESTS
from spmd_tx.coordinator.storage import disk
from spmd_tx.coordinator.storage.outages import OUTAGES
from spmd_tx.coordinator.tenancy import stored_checkpoints

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS = 2.0
SECONDS_BETWEEN = 30.0
SECONDS_BETWEEN_MEASUREMENTS = 300.0  # of the whole data directory


async def run_housekeeping(services: Services) -> NoReturn:
    """Run for ever. What fails because the database is gone is tried again the next time.

    Raises StartError when the database must not be used any more.
    """
    seconds_between = min(SECONDS_BETWEEN, services.config.session_timeout / 2)
    tidied_at, measured_at = clock.now(), 0.0
    while True:
        if services.database.end is not None:
            raise services.database.end
        now, was_short = clock.now(), services.storage.is_short
        try:
            await asyncio.to_thread(services.storage.measure)
            UNFINISHED_REQUESTS.set(len(services.queue.unfinished()))
            is_newly_short = services.storage.is_short and not was_short
            if is_newly_short or now - tidied_at >= seconds_between:
                tidied_at = now
                await tidy(services)
            if now - measured_at >= SECONDS_BETWEEN_MEASUREMENTS:
                measured_at = now
                await measure(services)
        except OUTAGES as error:
            logger.warning("housekeeping failed; trying again soon: %s", error)
        except BaseException as error:
            report(error, "housekeeping")
        await asyncio.sleep(min(SECONDS_BETWEEN_LOOKS, seconds_between))


async def tidy(services: Services, ahead: float = 0.0) -> None:
    """Do all of it once, as if it were so many seconds later."""
    now, timeout = clock.now() + ahead, services.config.session_timeout
    for session_id in await services.catalog.expire_sessions(now, timeout):
        services.scheduler.session_ended(session_id)
    believed = await asyncio.to_thread(services.reaper.clock.for_deletions) + ahead
    for path in await services.checkpoints.expire(believed):
        logger.info("checkpoint %s has expired and is deleted", path)
    async with services.database.transaction() as db:
        await stored_checkpoints.look(db, now)
    await services.reaper.reap(min(now, believed), retire=services.scheduler.retire)


async def measure(services: Services) -> None:
    services.storage.bytes_by_kind = await asyncio.to_thread(disk.by_kind, services.config.data_dir)
    for kind, size in services.storage.bytes_by_kind.items():
        DISK_BYTES.labels(kind).set(size)
