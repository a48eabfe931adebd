"""The API keys in a running server's memory, read again twice a second, so that no request waits for them.

While the database does not answer, the keys read last count. If there ever were keys, an empty table lets
nobody in: the database must have been exchanged, restored or damaged.
"""

import asyncio
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from sqlalchemy import update

from spmd_tx.coordinator.runtime.containment import let_pass, report
from spmd_tx.coordinator.runtime.metrics import KEYS_MISSING_SECONDS
from spmd_tx.coordinator.storage.database import Database
from spmd_tx.coordinator.storage.outages import OUTAGES
from spmd_tx.coordinator.storage.tables import ApiKeyRow
from spmd_tx.coordinator.tenancy import keys, keys_seen
from spmd_tx.coordinator.tenancy.callers import EVERYONE, Caller, KeyLimits
from spmd_tx.errors import Forbidden, Unauthorized

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LOOKS = 0.5
SECONDS_BETWEEN_NOTES = 60.0  # between two writes of a key's last use
LOOKS_BETWEEN_ERRORS = 120  # between two errors in the log about the loss of all keys

MISSING = (
    "this server wants an API key, and the request has none; set TINKER_API_KEY to one that the operator has "
    "made with: spmd-tx keys create"
)
GONE = (
    "this server had API keys and finds none in its database now, so it lets nobody in; its operator must "
    "restore the database, or make new keys with: spmd-tx keys create (docs/keys.md)"
)
UNKNOWN = "this server does not know this API key; see that it is complete, or ask the operator for one"


class Keyring:
    """Finds the caller behind a key. A server that has never had a key lets everyone in."""

    def __init__(
        self, database: Database, data_dir: Path, rows: Iterable[ApiKeyRow], were_seen: bool = False
    ) -> None:
        """``were_seen``: whether there were keys before, even if there are none now."""
        self._database = database
        self._data_dir = data_dir
        self._rows: dict[str, ApiKeyRow] = {}  # by hash
        self._by_id: dict[str, ApiKeyRow] = {}
        self._used_at: dict[str, float] = {}  # by id; uses that are not stored yet
        self._were_seen = were_seen
        self._is_noted = were_seen
        self._empty_looks = 0  # in a row
        self._set_rows(rows)

    @property
    def is_open(self) -> bool:
        """Whether everyone is let in. A server that loses or revokes its last key stays closed."""
        return not self._were_seen

    def caller(self, token: str | None) -> Caller:
        """The holder of a key. Raises Unauthorized. Every key, valid or not, costs a hash and a look-up."""
        if self.is_open:
            return EVERYONE
        if not self._rows:
            raise Unauthorized(GONE)
        if not token:
            raise Unauthorized(MISSING)
        return self._holder(self._rows.get(keys.digest(token)))

    def holder(self, key_id: str) -> Caller:
        """The holder of the key with this id, whose token was shown before. Raises Unauthorized."""
        return self._holder(self._by_id.get(key_id))

    def _holder(self, row: ApiKeyRow | None) -> Caller:
        if row is None:
            raise Unauthorized(UNKNOWN)
        now = time.time()
        problem = keys.problem(row, now)
        if problem is not None:
            raise Unauthorized(f"API key {row.id} of {row.owner!r} {problem}; ask the operator for a new one")
        self._used_at[row.id] = now
        limits = KeyLimits(row.adapters, row.queued_requests, row.queued_tokens, row.requests_per_second)
        return Caller(row.owner, row.role, row.id, limits)

    def vouch(self, caller: Caller) -> None:
        """Check that the key of a caller with a signed URL is still valid. Raises Forbidden.

        A URL that was made without a key is valid until there are keys.
        """
        row = self._by_id.get(caller.key_id or "")
        if caller.key_id is None and self.is_open:
            return
        if row is None or keys.problem(row, time.time()) is not None:
            raise Forbidden("the API key with which this URL was made is no longer valid; ask for a new one")
        if row.role != "admin" and row.owner != caller.owner:
            raise Forbidden(f"API key {row.id} does not see what belongs to {caller.owner!r} any more")

    async def watch(self) -> NoReturn:
        """Follow the database for ever. Raises StartError when the database must not be used any more."""
        is_away = False
        while True:
            await asyncio.sleep(SECONDS_BETWEEN_LOOKS)
            try:
                await self.look()
                await self.note_uses()
                is_away = False
            except OUTAGES as error:
                if not is_away:
                    logger.warning("cannot read the API keys now; using those that are known: %s", error)
                is_away = True
            except BaseException as error:
                let_pass(error)
                if not is_away:
                    report(error, "looking at the API keys")
                is_away = True

    async def look(self) -> None:
        """Read all keys again."""
        was_open = self.is_open
        async with self._database.reading() as db:
            self._set_rows(await keys.listed(db))
        if was_open and not self.is_open:
            logger.warning("from now on every request needs an API key")
        await self.note_keys()
        if self._rows or self.is_open:
            self._empty_looks = 0
            return
        KEYS_MISSING_SECONDS.inc(SECONDS_BETWEEN_LOOKS)
        if self._empty_looks % LOOKS_BETWEEN_ERRORS == 0:
            logger.error(
                "all API keys are gone from the database, so every request is refused: restore it, or create "
                "new ones; to serve everyone again, stop this server and run: spmd-tx keys remove-all"
            )
        self._empty_looks += 1

    async def note_keys(self) -> None:
        """Store, for the next start, that there are keys."""
        if self._were_seen and not self._is_noted:
            await keys_seen.note(self._database, self._data_dir)
            self._is_noted = True

    async def note_uses(self) -> None:
        """Store when keys were used last, each at most once a minute."""
        noted_at = {row.id: row.last_used_at or 0.0 for row in self._rows.values()}
        uses = {
            id: at for id, at in self._used_at.items() if at >= noted_at.get(id, at) + SECONDS_BETWEEN_NOTES
        }
        if uses:
            async with self._database.transaction() as db:
                values = [{"id": id, "last_used_at": at} for id, at in uses.items()]
                await db.execute(update(ApiKeyRow), values)
            self._used_at = {id: at for id, at in self._used_at.items() if at > uses.get(id, 0.0)}

    def _set_rows(self, rows: Iterable[ApiKeyRow]) -> None:
        self._by_id = {row.id: row for row in rows}
        self._rows = {row.hash: row for row in self._by_id.values()}
        self._were_seen = self._were_seen or bool(self._rows)


async def open_keyring(database: Database, data_dir: Path) -> Keyring:
    async with database.reading() as db:
        keyring = Keyring(database, data_dir, await keys.listed(db), await keys_seen.were_seen(db, data_dir))
    try:
        await keyring.note_keys()
    except OUTAGES as error:
        logger.warning("cannot record now that there are API keys; trying again soon: %s", error)
    return keyring
