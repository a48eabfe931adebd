"""Routes for usage and for the audit log. Nothing is billed: every cost is 0."""

import asyncio
from contextlib import aclosing
from datetime import UTC, date, datetime
from typing import Literal, cast

import msgspec
from litestar import Controller, get
from litestar.params import FromQuery

from spmd_tx.coordinator.http.answer_guard import in_turn
from spmd_tx.coordinator.http.services import ApiCall
from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.storage.tables import AuditRow
from spmd_tx.coordinator.tenancy import audit, stored_checkpoints, usage_report
from spmd_tx.coordinator.wire.moments import Moment
from spmd_tx.coordinator.wire.page_room import PageRoom
from spmd_tx.coordinator.wire.usage import (
    AuditEntry,
    AuditResponse,
    StorageResponse,
    UsageEvent,
    UsageResponse,
)

MOST_NUMBER = 2**31 - 1  # of the column

EventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]


class UsageController(Controller):
    @get("/billing/usage/events", guards=[in_turn])
    async def usage(
        self,
        call: ApiCall,
        starting_on: FromQuery[Moment],
        ending_before: FromQuery[Moment],
        offset: FromQuery[int | None] = None,
    ) -> UsageResponse:
        """Return usage by the hour: all of a window, or from an ``offset`` on as much as a page has."""
        window, now = usage_report.window(starting_on, ending_before), clock.now()
        async with call.services.database.transaction() as db:
            await stored_checkpoints.look(db, now)
        page = usage_report.EventPage(offset, call.bounds.answer_bytes)
        async with call.services.database.reading() as db:
            response = await usage_report.usage(db, window, call.caller, now, page)
        return await asyncio.to_thread(_encoded, response)

    @get("/billing/usage/checkpoints/current", guards=[in_turn])
    async def current_storage(
        self, call: ApiCall, project_id: FromQuery[str | None] = None
    ) -> StorageResponse:
        """Return the bytes of the checkpoints that there are now."""
        async with call.services.database.reading() as db:
            return await usage_report.current_storage(db, project_id, call.caller, call.bounds.answer_bytes)

    @get("/audit", guards=[in_turn])
    async def audit(
        self,
        call: ApiCall,
        event_type: FromQuery[EventType] = "all",
        day: FromQuery[date | None] = None,
        before: FromQuery[int | None] = None,
    ) -> AuditResponse:
        """Return the audit log of one day, UTC; by default of today. If it is long, its newest part."""
        end = None if before is None else min(max(before, 0), MOST_NUMBER)
        query = audit.AuditQuery(event_type, day or datetime.now(UTC).date(), end)
        room, entries, last = PageRoom(call.bounds.answer_bytes), list[AuditEntry](), 0
        async with (
            call.services.database.reading() as db,
            aclosing(audit.entries(db, query, call.caller)) as pieces,
        ):
            async for row in (row async for piece in pieces for (row,) in piece):
                entry = _entry(row)
                if len(entries) == audit.MOST_ENTRIES or not room.takes(entry):
                    return AuditResponse(entries[::-1], last)
                entries.append(entry)
                last = row.number
        return AuditResponse(entries[::-1])


def _encoded(response: UsageResponse) -> UsageResponse:
    """Encode each event by itself, as they are too many to be encoded at once in the event loop. Blocks."""
    events = [msgspec.Raw(msgspec.json.encode(event)) for event in response.data]
    return msgspec.structs.replace(response, data=cast(list[UsageEvent], events))


def _entry(row: AuditRow) -> AuditEntry:
    who = {"actor": row.actor, "api_key_id": row.key_id, "owner": row.owner}
    path = row.details.get("tinker_path")
    return AuditEntry(
        timestamp=datetime.fromtimestamp(row.at, UTC),
        event=row.event,
        event_details=who | row.details,
        model_id=None if path is None else path.removeprefix("tinker://").partition("/")[0],
        tinker_path=path,
        purpose=row.details.get("purpose"),
    )
