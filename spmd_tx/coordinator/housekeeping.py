"""What the server does from time to time: end silent sessions, delete what has outlived its time."""

import asyncio
import time
from typing import NoReturn

from spmd_tx.coordinator.dependencies import Services

PERIOD = 30.0  # seconds
RESULTS_KEPT = 24 * 3600.0  # seconds; the SDK asks again within minutes


async def keep_house(services: Services) -> NoReturn:
    while True:
        await asyncio.sleep(PERIOD)
        await tidy_up(services, time.time())


async def tidy_up(services: Services, now: float) -> None:
    for session_id in await services.catalog.expire_sessions(now, services.config.session_timeout):
        services.scheduler.session_ended(session_id)
    await services.checkpoints.expire(now)
    await services.queue.prune(now - RESULTS_KEPT)
