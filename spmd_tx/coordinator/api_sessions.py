"""Routes for what a client does before and beside training: handshake, sessions, capabilities, health."""

from litestar import Controller, Response, get, post, put
from litestar.params import FromPath, FromQuery, JSONBody
from litestar.status_codes import HTTP_200_OK, HTTP_410_GONE

from spmd_tx.coordinator import listings
from spmd_tx.coordinator.api_health import readiness
from spmd_tx.coordinator.dependencies import Service
from spmd_tx.coordinator.http_errors import ErrorResponse, error_response
from spmd_tx.coordinator.schemas import (
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
    SessionsResponse,
    SetProjectRequest,
    StatusResponse,
    SupportedModel,
)


class SessionsController(Controller):
    path = "/api/v1"

    @post("/client/config", status_code=HTTP_200_OK)
    async def client_config(self) -> ClientConfigResponse:
        return ClientConfigResponse()

    @post("/client/dynamic_config", status_code=HTTP_200_OK)
    async def dynamic_config(self) -> DynamicConfigResponse:
        return DynamicConfigResponse()

    @get("/healthz")
    async def healthz(self, services: Service) -> Response[HealthResponse]:
        """200 once a request would be served at once."""
        return readiness(services.health)

    @get("/get_server_capabilities")
    async def capabilities(self, services: Service) -> ServerCapabilitiesResponse:
        model = SupportedModel(services.config.model_name, services.max_context)
        return ServerCapabilitiesResponse([model])

    @post("/telemetry", status_code=HTTP_200_OK)
    async def telemetry(self) -> StatusResponse:
        """Taken and dropped: it may hold texts of users."""
        return StatusResponse("accepted")

    @post("/create_session", status_code=HTTP_200_OK)
    async def create_session(
        self, data: JSONBody[CreateSessionRequest], services: Service
    ) -> CreateSessionResponse:
        session = await services.catalog.create_session(data)
        message = f"the server is still {services.health.phase}; until it is ready, requests wait"
        return CreateSessionResponse(session.id, info_message=None if services.health.ready else message)

    @post("/session_heartbeat", status_code=HTTP_200_OK)
    async def heartbeat(
        self, data: JSONBody[SessionHeartbeatRequest], services: Service
    ) -> Response[SessionHeartbeatResponse] | ErrorResponse:
        if await services.catalog.heartbeat(data.session_id):
            return Response(SessionHeartbeatResponse(), status_code=HTTP_200_OK)
        return error_response(f"session {data.session_id!r} has ended", HTTP_410_GONE)

    @post("/sessions/{session_id:str}/finish", status_code=HTTP_200_OK)
    async def finish(
        self, session_id: FromPath[str], data: JSONBody[FinishSessionRequest], services: Service
    ) -> StatusResponse:
        """End a session; its models leave the device. Finishing it again changes nothing."""
        reason = f"its client finished: {data.reason.type}"
        if await services.catalog.end_session(session_id, reason):
            services.scheduler.session_ended(session_id)
        return StatusResponse("ok")

    @get("/sessions")
    async def sessions(
        self, services: Service, limit: FromQuery[int] = 20, offset: FromQuery[int] = 0
    ) -> SessionsResponse:
        return await listings.sessions(services.database, listings.Page(offset, limit))

    @get("/sessions/{session_id:str}")
    async def session(self, session_id: FromPath[str], services: Service) -> SessionResponse:
        session = await services.catalog.session(session_id)
        return await listings.session(services.database, session)

    @put("/sessions/{session_id:str}/project")
    async def set_project(
        self, session_id: FromPath[str], data: JSONBody[SetProjectRequest], services: Service
    ) -> StatusResponse:
        await services.catalog.set_project(session_id, data.project_id)
        return StatusResponse("ok")
