"""Routes that wait for results."""

import asyncio

from litestar import Controller, Request, Response, post
from litestar.params import JSONBody
from litestar.status_codes import HTTP_200_OK, HTTP_408_REQUEST_TIMEOUT

from spmd_tx.coordinator import json_forms, request_log
from spmd_tx.coordinator.access import Access
from spmd_tx.coordinator.dependencies import Accessible, Service, Services
from spmd_tx.coordinator.request_queue import Failed, Outcome
from spmd_tx.coordinator.route_marks import SDK_READS
from spmd_tx.coordinator.schemas import (
    CancelFutureRequest,
    FailureResponse,
    RetrieveFutureRequest,
    StatusResponse,
    TryAgainResponse,
)
from spmd_tx.coordinator.wire import JSON, PROTOBUF

LONG_POLL_SECONDS = 30.0  # the SDK hangs up after 45
STORAGE_SECONDS = 5.0  # more, for a database that answers slowly

FutureOutcome = Response[bytes] | Response[FailureResponse] | Response[TryAgainResponse]


class FuturesController(Controller):
    path = "/api/v1"

    @post("/retrieve_future", status_code=HTTP_200_OK, opt=SDK_READS)
    async def retrieve_future(
        self,
        request: Request,
        data: JSONBody[RetrieveFutureRequest],
        services: Service,
        access: Accessible,
    ) -> FutureOutcome:
        """Answer when the result is there; 408 after a while, upon which the SDK asks again at once."""
        waiting = asyncio.create_task(_wait(services, access, data.request_id))
        try:
            await asyncio.wait(
                [waiting, services.health.closing],
                timeout=LONG_POLL_SECONDS + STORAGE_SECONDS,
                return_when=asyncio.FIRST_COMPLETED,
            )
            outcome = waiting.result() if waiting.done() else None
        finally:
            waiting.cancel()
        if outcome is not None:
            return await _response(services, data.request_id, outcome, request.headers.get("accept", ""))
        status = services.scheduler.status(data.request_id)
        outage = services.storage.outage
        state, reason = ("paused_capacity", outage) if outage else (status.queue_state, status.reason)
        pending = TryAgainResponse(data.request_id, state, reason)
        return Response(pending, status_code=HTTP_408_REQUEST_TIMEOUT)

    @post("/cancel_future", status_code=HTTP_200_OK)
    async def cancel_future(
        self, data: JSONBody[CancelFutureRequest], services: Service, access: Accessible
    ) -> StatusResponse:
        """The client has given up on a sample; its tokens need not be drawn."""
        if await access.request(data.request_id, timeout=0):
            services.scheduler.cancel(data.request_id)
        return StatusResponse("ok")


async def _wait(services: Services, access: Access, request_id: str) -> Outcome | None:
    """The outcome of a request of the caller's, or None when it takes too long."""
    if not await access.request(request_id, LONG_POLL_SECONDS):
        return None
    return await services.queue.wait(request_id, LONG_POLL_SECONDS)


async def _response(services: Services, request_id: str, outcome: Outcome, accept: str) -> FutureOutcome:
    if isinstance(outcome, Failed):
        return Response(FailureResponse(outcome.error, outcome.category), status_code=HTTP_200_OK)
    if outcome.content_type == PROTOBUF and json_forms.is_wanted(accept):
        async with services.database.reading() as db:
            kind = await request_log.kind_of(db, request_id)
        body = await asyncio.to_thread(json_forms.from_protobuf, kind, outcome.body)
        return Response(body, media_type=JSON, status_code=HTTP_200_OK)
    return Response(outcome.body, media_type=outcome.content_type, status_code=HTTP_200_OK)
