"""Routes that create, describe and list models (training runs)."""

import time

import msgspec
from litestar import Controller, get, post
from litestar.params import FromPath, FromQuery, JSONBody
from litestar.status_codes import HTTP_200_OK
from sqlalchemy import insert

from spmd_tx.coordinator.catalog import catalog, listings
from spmd_tx.coordinator.catalog.listings import AccessScope, ListingPage, SessionFilter
from spmd_tx.coordinator.http.answer_guard import in_turn
from spmd_tx.coordinator.http.authentication import READS
from spmd_tx.coordinator.http.services import ApiCall, accepts_work, check_running
from spmd_tx.coordinator.requests.records import RequestKind
from spmd_tx.coordinator.storage.tables import ModelRow
from spmd_tx.coordinator.training import validation
from spmd_tx.coordinator.training.optimizers import config_of
from spmd_tx.coordinator.wire import limits
from spmd_tx.coordinator.wire.checkpoints import TrainingRun, TrainingRunsResponse
from spmd_tx.coordinator.wire.futures import FutureResponse
from spmd_tx.coordinator.wire.page_room import PageRoom
from spmd_tx.coordinator.wire.training import (
    CreateModelRequest,
    GetInfoRequest,
    GetInfoResponse,
    LoadWeightsRequest,
    ModelData,
)
from spmd_tx.protocol.commands import AdapterSpec


class ModelsController(Controller):
    @post("/create_model", status_code=HTTP_200_OK, guards=[accepts_work])
    async def create_model(self, data: JSONBody[CreateModelRequest], call: ApiCall) -> FutureResponse:
        """Queue a fresh adapter. The same (session_id, model_seq_id) is the same model."""
        named = call.services.bases.need_to_train(data.base_model or call.services.bases.default_name)
        adapter = validation.check_lora(data.lora_config, data.optimizer_config, named.base.limits)
        return await queue_model(call, named.name, data, adapter)

    @post("/get_info", status_code=HTTP_200_OK, opt=READS)
    async def get_info(self, data: JSONBody[GetInfoRequest], call: ApiCall) -> GetInfoResponse:
        """Describe a model. The client takes its tokenizer from here, and caches the answer."""
        model = await call.model(data.model_id)
        base = call.services.bases.of_row(model.base_model)
        return GetInfoResponse(
            model_id=model.id,
            model_data=ModelData(
                base.model.config.architecture,
                model.base_model,
                base.tokenizer_id,
            ),
            model_name=model.base_model,
            is_lora=model.rank > 0,
            lora_rank=model.rank,
            optimizer_config=config_of(model.optimizer),
        )

    @get("/training_runs", guards=[in_turn])
    async def training_runs(
        self,
        call: ApiCall,
        limit: FromQuery[int] = 20,
        offset: FromQuery[int] = 0,
        access_scope: FromQuery[AccessScope] = "accessible",
        project_id: FromQuery[str | None] = None,
    ) -> TrainingRunsResponse:
        """List training runs, newest first. The cursor says how many there are, where a page ends early."""
        page, which = ListingPage(offset, limit), SessionFilter(access_scope, project_id)
        room = PageRoom(call.bounds.answer_bytes)
        return await listings.training_runs(call.services.database, page, call.caller, which, room)

    @get("/training_runs/{run_id:str}")
    async def training_run(
        self, run_id: FromPath[str], call: ApiCall, access_scope: FromQuery[AccessScope] = "accessible"
    ) -> TrainingRun:
        """Return a training run with its newest checkpoints."""
        return await listings.training_run(
            call.services.database, await call.within(access_scope).model(run_id)
        )


async def queue_model(
    call: ApiCall, base_model: str, request: CreateModelRequest | LoadWeightsRequest, adapter: AdapterSpec
) -> FutureResponse:
    """Store a new model together with the request that fills it. ``base_model`` is its name in answers."""
    session_id, seq_id = request.session_id, request.model_seq_id
    assert session_id is not None
    assert seq_id is not None
    limits.check_number("model_seq_id", seq_id, call.bounds, "models_per_session")
    await call.open_session(session_id)
    if request.user_metadata is not None:
        call.services.quotas.check_metadata(call.caller, len(msgspec.json.encode(request.user_metadata)))
    model_id = catalog.model_id(session_id, seq_id)
    row = insert(ModelRow).values(
        id=model_id,
        session_id=session_id,
        base_model=base_model,
        **msgspec.to_builtins(adapter),
        user_metadata=request.user_metadata,
        created_at=time.time(),
    )
    payload = msgspec.json.encode(request)
    base = call.services.bases.of_row(base_model)
    check_running(call.services, base)
    async with call.services.quotas.room_for_adapter(call.caller, model_id):
        kind: RequestKind = "create_model" if isinstance(request, CreateModelRequest) else "load_weights"
        request_id = await call.services.queue.submit(
            kind, model_id, 0, session_id, payload, base=base.key, also=[row]
        )
    return FutureResponse(request_id, model_id=model_id)
