"""Fails the requests that the operator gives up with ``spmd-tx requests``, beside the running server."""

import asyncio
import logging
from collections.abc import Callable
from typing import NoReturn

from spmd_tx.coordinator.requests import overview
from spmd_tx.coordinator.requests.queue import RequestQueue
from spmd_tx.coordinator.runtime.containment import contained
from spmd_tx.coordinator.storage.database import Database
from spmd_tx.coordinator.storage.outages import OUTAGES

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS = 1.0


class GivenUpWatcher:
    """Passes given-up requests on to the scheduler, and logs once when one comes too late."""

    def __init__(self, database: Database, log: RequestQueue, give_up: Callable[[str, str], bool]) -> None:
        """``give_up`` takes the id of a request and why; False: it comes too late."""
        self._database = database
        self._log = log
        self._give_up = give_up
        self._too_late: set[str] = set()

    async def watch(self) -> NoReturn:
        """Look for ever. Raises StartError when the database must not be used any more."""
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
            with contained("looking for requests that the operator has given up"):
                try:
                    await self.look()
                except OUTAGES as error:  # the queue logs outages
                    logger.debug("cannot see which requests were given up: %s", error)

    async def look(self) -> None:
        given_up = await self._log.given_up()
        self._too_late &= given_up.keys()
        for request_id, why in given_up.items():
            if not self._give_up(request_id, why) and request_id not in self._too_late:
                await self._report_too_late(request_id)
                self._too_late.add(request_id)

    async def _report_too_late(self, request_id: str) -> None:
        logger.warning(
            "request %s was given up by the operator, but has begun, and may have changed its model: its "
            "result stands if it comes; if the workers or this server end before, it fails",
            request_id,
        )
        async with self._database.transaction() as db:
            request = await overview.with_id(db, request_id)
            if request is not None:
                overview.note(db, "request_give_up_late", request)
