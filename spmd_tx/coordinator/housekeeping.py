"""What has to be done from time to time: end silent sessions, delete what has outlived its time."""

import asyncio
import logging
import time
from typing import NoReturn

from sqlalchemy.exc import SQLAlchemyError

from spmd_tx.coordinator.dependencies import Services

logger = logging.getLogger(__name__)

SECONDS_BETWEEN = 30.0
RESULTS_KEPT_SECONDS = 3600.0  # beyond the time after which a silent client is taken to be gone


async def keep_house(services: Services) -> NoReturn:
    """Run for ever. A database that cannot be reached now is tried again the next time."""
    while True:
        await asyncio.sleep(min(SECONDS_BETWEEN, services.config.session_timeout / 2))
        try:
            await tidy(services, time.time())
        except (OSError, SQLAlchemyError) as error:
            logger.warning("housekeeping failed, and is tried again soon: %s", error)


async def tidy(services: Services, now: float) -> None:
    """Do all of it once. ``now`` is in seconds since the epoch."""
    timeout = services.config.session_timeout
    for session_id in await services.catalog.expire_sessions(now, timeout):
        services.scheduler.session_ended(session_id)
    for path in await services.checkpoints.expire(now):
        logger.info("checkpoint %s has expired and is deleted", path)
    await services.queue.prune(before=now - timeout - RESULTS_KEPT_SECONDS)
