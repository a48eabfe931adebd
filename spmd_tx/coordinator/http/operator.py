"""Routes for the operator: liveness, readiness, and metrics for Prometheus."""

from litestar import Controller, Response, get
from litestar.status_codes import HTTP_200_OK, HTTP_503_SERVICE_UNAVAILABLE

from spmd_tx.coordinator.http.authentication import OPEN
from spmd_tx.coordinator.http.services import Health, Service
from spmd_tx.coordinator.runtime import metrics
from spmd_tx.coordinator.wire.sessions import HealthResponse


class MetricsController(Controller):
    @get("/metrics")
    async def metrics(self) -> Response[bytes]:
        """Return the server's metrics, for Prometheus."""
        return Response(metrics.exposition(), media_type=metrics.CONTENT_TYPE, status_code=HTTP_200_OK)


class HealthController(Controller):
    path = "/"

    @get("/healthz", opt=OPEN)
    async def healthz(self, services: Service) -> HealthResponse:
        """Answer 200 as long as the API works, even without workers: a restart would not help."""
        return HealthResponse("ok", programs=services.health.programs)

    @get("/readyz", opt=OPEN)
    async def readyz(self, services: Service) -> Response[HealthResponse]:
        """Answer 200 while workers run commands, else 503 with the reason."""
        return readiness(services.health)


def readiness(health: Health) -> Response[HealthResponse]:
    if health.refusal is not None:
        return Response(HealthResponse("stopping", health.refusal), status_code=HTTP_503_SERVICE_UNAVAILABLE)
    if not health.ready:
        return Response(HealthResponse("starting", health.phase), status_code=HTTP_503_SERVICE_UNAVAILABLE)
    return Response(HealthResponse("ok"), status_code=HTTP_200_OK)
