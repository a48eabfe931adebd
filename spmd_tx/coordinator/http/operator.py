"""Routes for the operator: liveness, readiness, and metrics for Prometheus."""

from litestar import Controller, Response, get
from litestar.params import FromQuery
from litestar.status_codes import HTTP_200_OK, HTTP_503_SERVICE_UNAVAILABLE

from spmd_tx.coordinator.bases.health import GroupHealth, ServerHealth
from spmd_tx.coordinator.http.authentication import OPEN
from spmd_tx.coordinator.http.services import Service, Services
from spmd_tx.coordinator.runtime import metrics
from spmd_tx.coordinator.wire.sessions import GroupHealthResponse, HealthResponse
from spmd_tx.errors import NotFound
from spmd_tx.group_names import template_of


class OperatorController(Controller):
    @get("/metrics")
    async def metrics(self) -> Response[bytes]:
        """Return the server's metrics, for Prometheus."""
        return Response(metrics.exposition(), media_type=metrics.CONTENT_TYPE, status_code=HTTP_200_OK)

    @get("/healthz", opt=OPEN)
    async def healthz(self, services: Service) -> HealthResponse:
        """Answer 200 as long as the API works, even without workers: a restart would not help."""
        health = services.health
        groups = {each.name: _of_group(each) for each in health.groups} if len(health.groups) > 1 else None
        return HealthResponse("ok", programs=health.programs, groups=groups)

    @get("/readyz", opt=OPEN)
    async def readyz(
        self,
        services: Service,
        group: FromQuery[str | None] = None,
        base: FromQuery[str | None] = None,
    ) -> Response[HealthResponse]:
        """Answer 200 while any workers run commands, of a group or of a base model if one is named.

        Else the answer is 503 with the reason.
        """
        if group is None and base is None:
            return readiness(services.health)
        return _readiness_of_some(services, group, base)


def _of_group(group: GroupHealth) -> GroupHealthResponse:
    detail = None if group.state == "ready" else group.phase
    return GroupHealthResponse(group.base, group.state, detail, group.programs)


def _readiness_of_some(services: Services, group: str | None, base: str | None) -> Response[HealthResponse]:
    """Say whether any group of this name, of this base model, is ready. Raises NotFound if there is none."""
    health = services.health
    wanted = None if base is None else services.bases.need(base).base.key
    found = [
        each
        for each in health.groups
        if group in (None, each.name, template_of(each.name)) and wanted in (None, each.base_key)
    ]
    if not found:
        names = ", ".join(each.name for each in health.groups)
        raise NotFound(f"there is no group {group!r} of that base model; groups: {names}")
    if health.refusal is None and not any(each.state == "ready" for each in found):
        detail = "; ".join(f"{each.name}: {each.phase}" for each in found)
        return Response(HealthResponse("starting", detail), status_code=HTTP_503_SERVICE_UNAVAILABLE)
    return readiness(health)


def readiness(health: ServerHealth) -> Response[HealthResponse]:
    if health.refusal is not None:
        return Response(HealthResponse("stopping", health.refusal), status_code=HTTP_503_SERVICE_UNAVAILABLE)
    if not health.ready:
        return Response(HealthResponse("starting", health.phase), status_code=HTTP_503_SERVICE_UNAVAILABLE)
    return Response(HealthResponse("ok"), status_code=HTTP_200_OK)
