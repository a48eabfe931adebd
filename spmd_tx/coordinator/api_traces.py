"""Routes that export a session's requests as a timeline for Perfetto."""

from litestar import Controller, Request, get
from litestar.params import FromPath
from litestar.response import File

from spmd_tx.coordinator.http.authentication import SIGNED
from spmd_tx.coordinator.http.public_address import base_url
from spmd_tx.coordinator.http.services import Accessible, Service
from spmd_tx.coordinator.wire.sessions import TraceExportResponse


class TracesController(Controller):
    path = "/api/v1"

    @get("/sessions/{session_id:str}/trace_export")
    async def trace_export(
        self, request: Request, session_id: FromPath[str], services: Service, access: Accessible
    ) -> TraceExportResponse:
        """Build a trace, or say how far it is; the SDK asks again until it is ready."""
        session = await access.session(session_id)
        export = await services.traces.export(session)
        if export.error is not None:
            return TraceExportResponse("failed", error=export.error)
        if export.path is None:
            return TraceExportResponse("pending")
        path = f"/api/v1/sessions/{session_id}/trace"
        base = base_url(request, services.config.trusted_proxies)
        url = services.signed_urls.sign(base, path, session.owner, access.caller.key_id)
        return TraceExportResponse("ready", url=url)

    @get("/sessions/{session_id:str}/trace", opt=SIGNED)
    async def trace(self, session_id: FromPath[str], services: Service, access: Accessible) -> File:
        """What was built. Plain HTTP clients fetch it, by its signed URL."""
        path = await services.traces.file(await access.session(session_id))
        return File(path, filename=f"{session_id}.pftrace", media_type="application/json")
