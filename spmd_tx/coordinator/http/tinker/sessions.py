"""Routes for sessions and their traces, and for the handshake: configuration, capabilities, health."""

import msgspec
from litestar import Controller, Request, Response, get, post, put
from litestar.params import FromPath, FromQuery, JSONBody
from litestar.response import File
from litestar.status_codes import HTTP_200_OK, HTTP_410_GONE

from spmd_tx.coordinator.catalog import listings, session_search
from spmd_tx.coordinator.catalog.listings import AccessScope, ListingPage, SessionFilter
from spmd_tx.coordinator.http.answer_guard import in_turn, take_turn
from spmd_tx.coordinator.http.authentication import DROPS, OPEN, READS, SDK_READS, SIGNED, UNMETERED
from spmd_tx.coordinator.http.errors import ErrorResponse, error_response
from spmd_tx.coordinator.http.operator import readiness
from spmd_tx.coordinator.http.services import ApiCall, Service
from spmd_tx.coordinator.wire.fields import StatusResponse
from spmd_tx.coordinator.wire.sessions import (
    ClientConfigResponse,
    CreateSessionRequest,
    CreateSessionResponse,
    DynamicConfigResponse,
    FinishSessionRequest,
    HealthResponse,
    ServerCapabilitiesResponse,
    SessionHeartbeatRequest,
    SessionHeartbeatResponse,
    SessionResponse,
    SessionSearchRequest,
    SessionSearchResponse,
    SessionsResponse,
    SetProjectRequest,
    SupportedModel,
    TraceExportResponse,
)

BYTES_OF_ID = 128  # of a model and a sampler together


class SessionsController(Controller):
    @post("/client/config", status_code=HTTP_200_OK, opt=SDK_READS)
    async def client_config(self) -> ClientConfigResponse:
        """Tell the SDK which optional parts of the protocol this server has."""
        return ClientConfigResponse()

    @post("/client/dynamic_config", status_code=HTTP_200_OK, opt=SDK_READS)
    async def dynamic_config(self) -> DynamicConfigResponse:
        """Tell the SDK of settings that it looks up again from time to time."""
        return DynamicConfigResponse()

    @get("/healthz", opt=OPEN)
    async def healthz(self, services: Service) -> Response[HealthResponse]:
        """Answer 200 once requests are served at once."""
        return readiness(services.health)

    @get("/get_server_capabilities")
    async def capabilities(self, services: Service) -> ServerCapabilitiesResponse:
        """List the names of the base models, with the longest context of each."""
        return ServerCapabilitiesResponse(
            [
                SupportedModel(name, base.names.max_context, base.is_trainable)
                for base in services.bases.all
                for name in base.names.names
            ]
        )

    @post("/telemetry", status_code=HTTP_200_OK, opt=DROPS)
    async def telemetry(self, request: Request) -> StatusResponse:
        """Drop telemetry: it may hold texts of users."""
        async for _ in request.stream():
            pass
        return StatusResponse("accepted")

    @post("/create_session", status_code=HTTP_200_OK)
    async def create_session(
        self, data: JSONBody[CreateSessionRequest], call: ApiCall
    ) -> CreateSessionResponse:
        """Open a session, which holds the models and samplers of a client."""
        await call.services.quotas.check_session(call.caller, len(msgspec.json.encode(data)))
        session = await call.services.catalog.create_session(data, call.caller)
        message = f"the server is still {call.services.health.phase}; until it is ready, requests wait"
        return CreateSessionResponse(session.id, info_message=None if call.services.health.ready else message)

    @post("/session_heartbeat", status_code=HTTP_200_OK, opt=UNMETERED)
    async def heartbeat(
        self, data: JSONBody[SessionHeartbeatRequest], call: ApiCall
    ) -> Response[SessionHeartbeatResponse] | ErrorResponse:
        """Keep a session open. Once it has ended, the answer is 410."""
        await call.session(data.session_id)
        if await call.services.catalog.heartbeat(data.session_id):
            return Response(SessionHeartbeatResponse(), status_code=HTTP_200_OK)
        return error_response(f"session {data.session_id!r} has ended", HTTP_410_GONE)

    @post("/sessions/{session_id:str}/finish", status_code=HTTP_200_OK)
    async def finish(
        self, session_id: FromPath[str], data: JSONBody[FinishSessionRequest], call: ApiCall
    ) -> StatusResponse:
        """End a session; its models leave the device. A second call changes nothing."""
        await call.session(session_id)
        if await call.services.catalog.finish_session(session_id, data, call.caller):
            call.services.scheduler.session_ended(session_id)
        return StatusResponse("ok")

    @get("/sessions", guards=[in_turn])
    async def sessions(
        self,
        call: ApiCall,
        limit: FromQuery[int] = 20,
        offset: FromQuery[int] = 0,
        access_scope: FromQuery[AccessScope] = "accessible",
    ) -> SessionsResponse:
        """List sessions, newest first."""
        page, which = ListingPage(offset, limit), SessionFilter(access_scope)
        return await listings.sessions(call.services.database, page, call.caller, which)

    @post("/sessions/search", status_code=HTTP_200_OK, opt=READS)
    async def search(self, data: JSONBody[SessionSearchRequest], call: ApiCall) -> SessionSearchResponse:
        """Search sessions by project, metadata, name, owner and status."""
        await take_turn(call.request, "pages")
        silent = call.services.catalog.silent_seconds
        return await session_search.search(call.services.database, data, call.caller, call.bounds, silent)

    @get("/sessions/{session_id:str}", guards=[in_turn])
    async def session(
        self,
        session_id: FromPath[str],
        call: ApiCall,
        offset: FromQuery[int] = 0,
        access_scope: FromQuery[AccessScope] = "accessible",
    ) -> SessionResponse:
        """Return a session with the IDs of its training runs and samplers, oldest first."""
        most = call.bounds.answer_bytes // BYTES_OF_ID
        session = await call.within(access_scope).session(session_id)
        response = await listings.session(call.services.database, session, offset, most)
        is_open = not call.services.catalog.has_ended(session_id)
        silent_seconds = call.services.catalog.silent_seconds(session_id)
        return msgspec.structs.replace(response, is_open=is_open, silent_seconds=silent_seconds)

    @put("/sessions/{session_id:str}/project")
    async def set_project(
        self, session_id: FromPath[str], data: JSONBody[SetProjectRequest], call: ApiCall
    ) -> StatusResponse:
        """Move a session to another project."""
        await call.session(session_id)
        await call.services.catalog.set_project(session_id, data.project_id, call.caller)
        return StatusResponse("ok")

    @get("/sessions/{session_id:str}/trace_export")
    async def trace_export(self, call: ApiCall, session_id: FromPath[str]) -> TraceExportResponse:
        """Build a trace and return its URL; the SDK asks again until it is ready."""
        session = await call.session(session_id)
        export = await call.services.traces.export(session)
        if export.error is not None:
            return TraceExportResponse("failed", error=export.error)
        if export.path is None:
            return TraceExportResponse("pending")
        url = call.sign(f"/api/v1/sessions/{session_id}/trace", session.owner)
        return TraceExportResponse("ready", url=url)

    @get("/sessions/{session_id:str}/trace", opt=SIGNED)
    async def trace(self, session_id: FromPath[str], call: ApiCall) -> File:
        """Send the trace. Any HTTP client can fetch it by its signed URL."""
        path = await call.services.traces.file(await call.session(session_id))
        return File(path, filename=f"{session_id}.pftrace", media_type="application/json")
