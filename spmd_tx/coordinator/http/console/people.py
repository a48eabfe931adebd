"""Routes that show an admin who has API keys, and what their owners have used; and that revoke a key."""

import time
from dataclasses import asdict

from litestar import Controller, delete
from litestar.params import FromPath, FromQuery
from litestar.status_codes import HTTP_200_OK
from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from spmd_tx.coordinator.http.answer_guard import polled
from spmd_tx.coordinator.http.services import ApiCall
from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.storage.row_pieces import in_pieces
from spmd_tx.coordinator.storage.tables import ApiKeyRow, UsageRow
from spmd_tx.coordinator.tenancy import keys
from spmd_tx.coordinator.tenancy.callers import Caller, KeyLimits
from spmd_tx.coordinator.tenancy.usage import HOUR_SECONDS
from spmd_tx.coordinator.wire.console.people import HourOfUse, Key, KeysResponse, UseResponse
from spmd_tx.coordinator.wire.fields import StatusResponse
from spmd_tx.errors import NotFound

EVERYBODYS = "keys and usage of everybody are"
MOST_KEYS = 1000
MOST_HOURS = 24 * 7
MOST_ROWS = 20_000  # an hour of an owner each
ROWS_AT_ONCE = 1000

AMOUNTS = (UsageRow.trained, UsageRow.forwarded, UsageRow.prompt, UsageRow.cached, UsageRow.sampled)


class PeopleController(Controller):
    path = "/console/api"

    @polled("/keys")
    async def keys(self, call: ApiCall) -> KeysResponse:
        """List API keys, for admins only."""
        call.check_admin(EVERYBODYS)
        newest = select(ApiKeyRow).order_by(ApiKeyRow.created_at.desc(), ApiKeyRow.id.desc()).limit(MOST_KEYS)
        async with call.services.database.reading() as db:
            rows = (await db.scalars(newest)).all()
            count = await db.scalar(select(func.count(ApiKeyRow.id))) or 0
        now = time.time()
        return KeysResponse([_shown(row, call.caller, now) for row in rows], count - len(rows))

    @delete("/keys/{key_id:str}", status_code=HTTP_200_OK)
    async def revoke_key(self, key_id: FromPath[str], call: ApiCall) -> StatusResponse:
        """Revoke a key. Its owner's sessions, models and checkpoints stay."""
        call.check_admin(EVERYBODYS)
        async with call.services.database.transaction() as db:
            if await db.get(ApiKeyRow, key_id) is None:
                raise NotFound(f"key {key_id!r} does not exist")
            await keys.revoke(db, key_id, call.caller)
        await call.services.keyring.look()
        return StatusResponse("ok")

    @polled("/usage")
    async def usage(self, call: ApiCall, hours: FromQuery[int] = 24) -> UseResponse:
        """Return what each owner has used, by the hour, in the last hours and the present one."""
        call.check_admin(EVERYBODYS)
        last = int(clock.now()) // HOUR_SECONDS * HOUR_SECONDS
        since = last - (min(max(hours, 1), MOST_HOURS) - 1) * HOUR_SECONDS
        async with call.services.database.reading() as db:
            entries = await _use(db, since)
        return UseResponse(since, last + HOUR_SECONDS - 1, entries[:MOST_ROWS], len(entries) > MOST_ROWS)


async def _use(db: AsyncSession, since: int) -> list[HourOfUse]:
    sums = (func.sum(amount) for amount in AMOUNTS)
    groups = UsageRow.hour, UsageRow.owner
    query = select(*groups, *sums).where(UsageRow.hour >= since).group_by(*groups).order_by(*groups)
    entries = list[HourOfUse]()
    async for piece in in_pieces(db, query.limit(MOST_ROWS + 1), ROWS_AT_ONCE):
        entries += [HourOfUse(hour, owner, *map(int, amounts)) for hour, owner, *amounts in piece]
    return entries


def _shown(row: ApiKeyRow, caller: Caller, now: float) -> Key:
    limits = KeyLimits(row.adapters, row.queued_requests, row.queued_tokens, row.requests_per_second)
    return Key(
        id=row.id,
        owner=row.owner,
        role=row.role,
        created_at=row.created_at,
        expires_at=row.expires_at,
        last_used_at=row.last_used_at,
        limits={name: amount for name, amount in asdict(limits).items() if amount is not None},
        problem=keys.problem(row, now),
        is_own=row.id == caller.key_id,
    )
