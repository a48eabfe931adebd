"""Routes for usage and for the audit log. Nothing is billed: every cost is 0."""

from datetime import UTC, date, datetime
from typing import Literal

from litestar import Controller, get
from litestar.params import FromQuery

from spmd_tx.coordinator.http.services import Accessible, Service
from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.storage.tables import AuditRow
from spmd_tx.coordinator.tenancy import audit, stored_checkpoints, usage_report
from spmd_tx.coordinator.wire.moments import Moment
from spmd_tx.coordinator.wire.usage import AuditEntry, AuditResponse, StorageResponse, UsageResponse

EventType = Literal["all", "checkpoints", "projects", "teams", "organizations"]


class UsageController(Controller):
    path = "/api/v1"

    @get("/billing/usage/events")
    async def usage(
        self,
        services: Service,
        access: Accessible,
        starting_on: FromQuery[Moment],
        ending_before: FromQuery[Moment],
    ) -> UsageResponse:
        """Return usage by the hour."""
        wanted, now = usage_report.window(starting_on, ending_before), clock.now()
        async with services.database.transaction() as db:
            await stored_checkpoints.look(db, now)
        async with services.database.reading() as db:
            return await usage_report.usage(db, wanted, access.caller, now)

    @get("/billing/usage/checkpoints/current")
    async def current_storage(
        self, services: Service, access: Accessible, project_id: FromQuery[str | None] = None
    ) -> StorageResponse:
        """Return the bytes of the checkpoints that there are now."""
        async with services.database.reading() as db:
            return await usage_report.current_storage(db, project_id, access.caller)

    @get("/audit")
    async def audit(
        self,
        services: Service,
        access: Accessible,
        event_type: FromQuery[EventType] = "all",
        day: FromQuery[date | None] = None,
    ) -> AuditResponse:
        """Return the audit log of one day, UTC; by default of today."""
        query = audit.AuditQuery(event_type, day or datetime.now(UTC).date())
        async with services.database.reading() as db:
            return AuditResponse([_entry(row) for row in await audit.entries(db, query, access.caller)])


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
