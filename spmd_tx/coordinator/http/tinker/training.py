"""Routes for training and custom losses. Each one queues a request and returns its future at once.

A well-formed request is accepted even when it cannot succeed: its future fails. The SDK never recovers when
the POST of one chunk of a call is refused.
"""

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

import msgspec
from litestar import Controller, Response, post
from litestar.status_codes import HTTP_200_OK

from spmd_tx.coordinator.http.authentication import BATCH
from spmd_tx.coordinator.http.services import ApiCall, accepts_work, check_running
from spmd_tx.coordinator.http.tinker.bodies import read_forward_backward, read_json, read_loss_request
from spmd_tx.coordinator.images import arrival
from spmd_tx.coordinator.requests.records import CHUNKED_KINDS, Failed, RequestKind
from spmd_tx.coordinator.runtime.threads import compute
from spmd_tx.coordinator.training.custom_loss_catalog import KIND, line_of
from spmd_tx.coordinator.wire import unknown_fields
from spmd_tx.coordinator.wire.futures import FutureResponse
from spmd_tx.coordinator.wire.limits import check_number
from spmd_tx.coordinator.wire.training import CreateCustomLossRequest, OptimStepRequest
from spmd_tx.custom_loss import definition as custom_loss
from spmd_tx.custom_loss.definition import MAX_BYTES, Definition
from spmd_tx.errors import UNREADABLE, InvalidRequest


class TrainingController(Controller):
    guards = [accepts_work]  # noqa: RUF012 (Litestar's own name)

    @post("/forward_backward", status_code=HTTP_200_OK, opt=BATCH)
    async def forward_backward(self, call: ApiCall) -> Response[FutureResponse]:
        """Queue a batch whose gradient is added to the model's; with forward_only just its losses."""
        address, body = await read_forward_backward(call)
        kind = "forward" if address.forward_only else "forward_backward"
        session_id = (await call.model(address.model_id)).session_id
        future = await queue_training(call, kind, address.model_id, address.seq_id, body)
        return Response(future, headers=call.services.notices.of_training(session_id, address.loss_fn))

    @post("/forward", status_code=HTTP_200_OK, opt=BATCH)
    async def forward(self, call: ApiCall) -> FutureResponse:
        """Queue a batch without gradient, which SDKs before 0.25 send instead of forward_only."""
        address, body = await read_loss_request(call, forward_only=True)
        return await queue_training(call, "forward", address.model_id, address.seq_id, body)

    @post("/optim_step", status_code=HTTP_200_OK)
    async def optim_step(self, call: ApiCall) -> FutureResponse:
        """Queue one update from the accumulated gradient."""
        step = await read_json(call, OptimStepRequest)
        payload = msgspec.json.encode(step)
        return await queue_training(call, "optim_step", step.model_id, step.seq_id, payload)

    @post("/create_custom_loss", status_code=HTTP_200_OK)
    async def create_custom_loss(self, call: ApiCall) -> FutureResponse:
        """Validate and store a traced loss; a refused loss fails through its future.

        The same (session_id, custom_loss_seq_id) is the same loss.
        """
        loss = _read(await call.request.body())
        await call.open_session(loss.session_id)
        definition = Definition(loss.name, loss.inputs, loss.graph)
        number, bounds = loss.custom_loss_seq_id, call.bounds
        is_allowed = partial(check_number, "custom_loss_seq_id", number, bounds, "custom_losses_per_session")
        problem = await asyncio.to_thread(problem_of, is_allowed, partial(custom_loss.read, definition))
        request_id = await call.services.queue.submit(
            KIND,
            line_of(loss.session_id),
            loss.custom_loss_seq_id,
            loss.session_id,
            msgspec.json.encode(definition),
            refused=None if problem is None else Failed(problem, "user"),
        )
        return FutureResponse(request_id)


def _read(body: bytes) -> CreateCustomLossRequest:
    if len(body) > MAX_BYTES:
        raise InvalidRequest(
            f"the custom loss has {len(body)} bytes; at most {MAX_BYTES} are allowed. "
            "Put long constants into loss_fn_inputs"
        )
    try:
        loss = msgspec.json.decode(body, type=CreateCustomLossRequest)
        unknown_fields.check_json(msgspec.json.decode(body), CreateCustomLossRequest)
    except (*UNREADABLE, RecursionError, InvalidRequest) as error:
        raise InvalidRequest(f"create_custom_loss cannot take this body: {error}") from None
    return loss


def problem_of(*checks: Callable[[], object]) -> str | None:
    """Return why the first of some checks refuses a request, whose future then fails with it."""
    try:
        for check in checks:
            check()
    except InvalidRequest as problem:
        return str(problem)
    return None


async def queue_training(
    call: ApiCall,
    kind: RequestKind,
    model_id: str,
    seq_id: int,
    payload: bytes,
    problem: str | None = None,
) -> FutureResponse:
    """Put a request into its model's line. Raises NotFound, and InvalidRequest only for an invalid number.

    A request with a ``problem`` fails through its future.
    """
    model = await call.model(model_id)
    if seq_id < 1:
        raise InvalidRequest(f"seq_id is {seq_id}; requests of a model are numbered from 1")
    misnumbered = await call.services.line_numbers.problem(model.id, seq_id)
    problem = misnumbered or await call.catalog.problem(model) or problem
    refused = None if problem is None else Failed(problem, "user")
    base = call.services.bases.of_row(model.base_model)
    check_running(call.services, base)
    images: Mapping[str, bytes] = {}
    if kind in CHUNKED_KINDS and base.limits.images is not None:
        payload, images = await compute(len(payload), arrival.of_training, payload, base.limits)
    request_id = await call.queue.submit(
        *(kind, model.id, seq_id, model.session_id, payload), base=base.key, refused=refused, images=images
    )
    if refused is not None and misnumbered is None:
        call.services.scheduler.consume(model.id, seq_id)
    return FutureResponse(request_id, model_id=model.id)
