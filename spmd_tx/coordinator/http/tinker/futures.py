"""Routes that wait for the results of requests, and cancel them."""

import asyncio

from litestar import Controller, Response, post
from litestar.params import JSONBody
from litestar.status_codes import HTTP_200_OK, HTTP_408_REQUEST_TIMEOUT

from spmd_tx.coordinator.http.authentication import SDK_READS
from spmd_tx.coordinator.http.services import ApiCall
from spmd_tx.coordinator.http.tinker import json_forms
from spmd_tx.coordinator.requests import rows
from spmd_tx.coordinator.requests.completions import Completion, SamplerClient, newest
from spmd_tx.coordinator.requests.records import Failed, Outcome
from spmd_tx.coordinator.wire.fields import StatusResponse
from spmd_tx.coordinator.wire.futures import (
    CancelFutureRequest,
    FailureResponse,
    FutureFailed,
    FutureFinished,
    RetrieveFutureRequest,
    RetrieveFuturesRequest,
    RetrieveFuturesResponse,
    TryAgainResponse,
)
from spmd_tx.coordinator.wire.training_protobuf import JSON, PROTOBUF
from spmd_tx.errors import InvalidRequest, Unavailable

LONG_POLL_SECONDS = 30.0  # the SDK hangs up after 45
STORAGE_SECONDS = 5.0  # additional, for a slow database

FutureOutcome = Response[bytes] | Response[FailureResponse] | Response[TryAgainResponse]


class FuturesController(Controller):
    @post("/retrieve_future", status_code=HTTP_200_OK, opt=SDK_READS)
    async def retrieve_future(self, call: ApiCall, data: JSONBody[RetrieveFutureRequest]) -> FutureOutcome:
        """Answer with the result, or with 408 after a while, upon which the SDK asks again at once."""
        waiting = _wait(call, data.request_id)
        if call.services.queue.has_at_hand(data.request_id):
            outcome = await waiting
        else:
            seconds = LONG_POLL_SECONDS + STORAGE_SECONDS
            done = await call.services.polls.wait(call.caller.owner, waiting, seconds)
            outcome = done and done.result()
        if outcome is not None:
            return await _response(call, data.request_id, outcome)
        status, outage = call.services.scheduler.status(data.request_id), call.services.storage.outage
        state, reason = ("paused_capacity", outage) if outage else (status.queue_state, status.reason)
        pending = TryAgainResponse(data.request_id, state, reason)
        return Response(pending, status_code=HTTP_408_REQUEST_TIMEOUT)

    @post("/retrieve_futures", status_code=HTTP_200_OK, opt=SDK_READS)
    async def retrieve_futures(
        self, data: JSONBody[RetrieveFuturesRequest], call: ApiCall
    ) -> RetrieveFuturesResponse:
        """Return which of a client's samples have ended, as soon as there is one; after a while, none."""
        sampler = await call.sampler(data.target.sampling_session_id)
        if data.target.cloned_sampler_id > sampler.clients:
            raise InvalidRequest(
                f"{sampler.id} has no client {data.target.cloned_sampler_id}; join_sampling_session gives "
                "numbers to clients"
            )
        call.services.queue.let_go(data.retrieved_request_ids)
        target = SamplerClient(data.target.sampling_session_id, data.target.cloned_sampler_id)
        completions = call.services.queue.completions
        ended = await completions.after(target, data.prev_cursor)
        seconds = LONG_POLL_SECONDS if data.timeout is None else min(data.timeout, LONG_POLL_SECONDS)
        if not ended and seconds > 0:
            waiting = completions.wait(target)
            done = await call.services.polls.wait(call.caller.owner, waiting, seconds)
            if done is None and call.services.health.closing.done():
                # An empty answer would let clients poll again at once, without a pause.
                raise Unavailable("the server is closing; ask again")
            ended = await completions.after(target, data.prev_cursor)
        return RetrieveFuturesResponse([_entry(each) for each in ended], newest(ended, data.prev_cursor))

    @post("/cancel_future", status_code=HTTP_200_OK)
    async def cancel_future(self, data: JSONBody[CancelFutureRequest], call: ApiCall) -> StatusResponse:
        """Cancel a sample for good: its tokens are not drawn after a restart either."""
        if await call.has_request(data.request_id, timeout=0):
            call.services.scheduler.cancel(data.request_id)
            if not await call.services.queue.settled(data.request_id, STORAGE_SECONDS):
                raise Unavailable("cannot store the cancellation now; send it again")
        return StatusResponse("ok")


def _entry(completion: Completion) -> FutureFinished | FutureFailed:
    if completion.failed:
        return FutureFailed(completion.request_id)
    return FutureFinished(completion.request_id, completion.size)


async def _wait(call: ApiCall, request_id: str) -> Outcome | None:
    """Return the outcome of a request of the caller's; None when it takes too long."""
    if not await call.has_request(request_id, LONG_POLL_SECONDS):
        return None
    return await call.services.queue.wait(request_id, LONG_POLL_SECONDS)


async def _response(call: ApiCall, request_id: str, outcome: Outcome) -> FutureOutcome:
    if isinstance(outcome, Failed):
        return Response(FailureResponse(outcome.error, outcome.category), status_code=HTTP_200_OK)
    if outcome.content_type == PROTOBUF and json_forms.is_wanted(call.request.headers.get("accept", "")):
        async with call.services.database.reading() as db:
            kind = (await rows.with_id(db, request_id)).kind
        body = await asyncio.to_thread(json_forms.from_protobuf, kind, outcome.body)
        return Response(body, media_type=JSON, status_code=HTTP_200_OK)
    return Response(outcome.body, media_type=outcome.content_type, status_code=HTTP_200_OK)
