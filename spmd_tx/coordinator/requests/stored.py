"""Reads what is stored of requests."""

import asyncio
import logging

from spmd_tx.coordinator.requests import rows
from spmd_tx.coordinator.requests.payload_files import PayloadFiles
from spmd_tx.coordinator.requests.records import Failed, Finished, Outcome, Request
from spmd_tx.coordinator.storage.database import Database
from spmd_tx.errors import DamagedBody

logger = logging.getLogger(__name__)


class StoredRequests:
    """Finds requests in the log, and their bodies in its files."""

    def __init__(self, database: Database, files: PayloadFiles) -> None:
        self._database = database
        self._files = files

    async def payload(self, request: Request) -> bytes:
        """Read a body as submitted. Raises DamagedBody."""
        async with self._database.reading() as db:
            place = rows.payload_of(await rows.with_id(db, request.id))
        try:
            return await asyncio.to_thread(self._files.read, place)
        except DamagedBody as error:
            logger.error("%s is lost: %s", request, error)
            raise DamagedBody(
                "the server has lost the body of this request: its file is damaged or missing"
            ) from error

    async def session(self, request_id: str) -> str:
        """Read the session of a request. Raises NotFound."""
        async with self._database.reading() as db:
            return (await rows.with_id(db, request_id)).session_id

    async def outcome(self, request_id: str) -> Outcome | None:
        """Read an outcome; None: there is none yet. Raises NotFound when it is no longer kept."""
        async with self._database.reading() as db:
            stored = await rows.outcome(db, request_id)
        if stored is None or isinstance(stored, Failed):
            return stored
        content_type, place = stored
        try:
            return Finished(content_type, await asyncio.to_thread(self._files.read, place))
        except DamagedBody as error:
            logger.error("the result of request %s is lost: %s", request_id, error)
            return Failed("the server has lost this result, its file is damaged or missing", "server")
