"""The keys as a running server knows them: in memory, looked at again every second, so that no request waits.

While the database does not answer, the keys that were last seen count.
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from typing import NoReturn

from sqlalchemy import update

from spmd_tx.coordinator import keys
from spmd_tx.coordinator.callers import EVERYONE, Caller, KeyLimits
from spmd_tx.coordinator.database import Database
from spmd_tx.coordinator.storage import OUTAGES
from spmd_tx.coordinator.tables import ApiKey
from spmd_tx.errors import Unauthorized

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_BETWEEN_NOTES = 60.0  # of when a key was used last

MISSING = (
    "this server wants an API key, and the request has none; set TINKER_API_KEY to one that the operator has "
    "made with: spmd-tx keys create"
)
UNKNOWN = "this server does not know this API key; see that it is complete, or ask the operator for one"


class Keyring:
    """All keys. Without any, everyone is let in."""

    def __init__(self, database: Database, rows: Iterable[ApiKey]) -> None:
        self._database = database
        self._rows: dict[str, ApiKey] = {}  # by hash
        self._used_at: dict[str, float] = {}  # by id; what is not stored yet
        self._take(rows)

    @property
    def is_empty(self) -> bool:
        """Keys that are not valid any more count: the end of the last one opens the server to nobody."""
        return not self._rows

    def caller(self, token: str | None) -> Caller:
        """Who holds a key. Raises Unauthorized. Every key, right or wrong, costs one hash and one look-up."""
        if self.is_empty:
            return EVERYONE
        if not token:
            raise Unauthorized(MISSING)
        row, now = self._rows.get(keys.digest(token)), time.time()
        if row is None:
            raise Unauthorized(UNKNOWN)
        problem = keys.problem(row, now)
        if problem is not None:
            raise Unauthorized(f"API key {row.id} of {row.owner!r} {problem}; ask the operator for a new one")
        self._used_at[row.id] = now
        limits = KeyLimits(row.adapters, row.queued_requests, row.queued_tokens, row.requests_per_second)
        return Caller(row.owner, row.role, row.id, limits)

    async def watch(self) -> NoReturn:
        """Keep up with the database, for ever. Raises StartError when it must not be used any more."""
        is_away = False
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
            try:
                await self.look()
                await self.note_uses()
                is_away = False
            except OUTAGES as error:
                if not is_away:
                    logger.warning("cannot look at the API keys now, and go on with those known: %s", error)
                is_away = True

    async def look(self) -> None:
        """See which keys are new, and which were revoked."""
        was_empty = self.is_empty
        async with self._database.reading() as db:
            self._take(await keys.listed(db))
        if was_empty and not self.is_empty:
            logger.warning("from now on every request needs an API key")

    async def note_uses(self) -> None:
        """Write down when keys were used, of each at most once a minute."""
        noted_at = {row.id: row.last_used_at or 0.0 for row in self._rows.values()}
        uses = {
            id: at for id, at in self._used_at.items() if at >= noted_at.get(id, at) + SECONDS_BETWEEN_NOTES
        }
        if uses:
            async with self._database.transaction() as db:
                values = [{"id": id, "last_used_at": at} for id, at in uses.items()]
                await db.execute(update(ApiKey), values)
            self._used_at = {id: at for id, at in self._used_at.items() if at > uses.get(id, 0.0)}

    def _take(self, rows: Iterable[ApiKey]) -> None:
        self._rows = {row.hash: row for row in rows}


async def open_keyring(database: Database) -> Keyring:
    async with database.reading() as db:
        return Keyring(database, await keys.listed(db))
