"""The route that takes custom losses in."""

import asyncio

import msgspec
from litestar import Controller, Request, post
from litestar.status_codes import HTTP_200_OK

from spmd_tx import custom_loss
from spmd_tx.bounds import Bounds
from spmd_tx.coordinator.http.services import Accessible, Service, takes_work
from spmd_tx.coordinator.requests.records import Failed
from spmd_tx.coordinator.training.custom_loss_catalog import KIND, line_of
from spmd_tx.coordinator.wire.futures import FutureResponse
from spmd_tx.coordinator.wire.limits import check_number
from spmd_tx.coordinator.wire.training import CreateCustomLossRequest
from spmd_tx.custom_loss import MAX_BYTES, Definition
from spmd_tx.errors import InvalidRequest


class CustomLossesController(Controller):
    path = "/api/v1"

    @post("/create_custom_loss", status_code=HTTP_200_OK, guards=[takes_work])
    async def create_custom_loss(
        self, request: Request, services: Service, access: Accessible
    ) -> FutureResponse:
        """Check and keep a traced loss; a loss that is refused fails through its future.

        The same (session_id, custom_loss_seq_id) is the same loss.
        """
        wish = _read(await request.body())
        await access.open_session(wish.session_id)
        definition = Definition(wish.name, wish.inputs, wish.graph)
        number, bounds = wish.custom_loss_seq_id, services.config.bounds
        problem = await asyncio.to_thread(_problem, definition, number, bounds)
        request_id = await services.queue.submit(
            KIND,
            line_of(wish.session_id),
            wish.custom_loss_seq_id,
            wish.session_id,
            msgspec.json.encode(definition),
            refused=None if problem is None else Failed(problem, "user"),
        )
        return FutureResponse(request_id)


def _read(body: bytes) -> CreateCustomLossRequest:
    if len(body) > MAX_BYTES:
        raise InvalidRequest(
            f"the custom loss has {len(body)} bytes; at most {MAX_BYTES} are taken. "
            "Long constants belong into loss_fn_inputs"
        )
    try:
        return msgspec.json.decode(body, type=CreateCustomLossRequest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"create_custom_loss cannot take this body: {error}") from None


def _problem(definition: Definition, number: int, bounds: Bounds) -> str | None:
    try:
        check_number("custom_loss_seq_id", number, bounds, "custom_losses_per_session")
        custom_loss.read(definition)
    except InvalidRequest as problem:
        return str(problem)
    return None
