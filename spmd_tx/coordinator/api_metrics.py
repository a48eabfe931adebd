"""The route that Prometheus reads."""

from litestar import Controller, Response, get
from litestar.status_codes import HTTP_200_OK

from spmd_tx.coordinator.runtime import metrics


class MetricsController(Controller):
    @get("/metrics")
    async def metrics(self) -> Response[bytes]:
        return Response(metrics.exposition(), media_type=metrics.CONTENT_TYPE, status_code=HTTP_200_OK)
