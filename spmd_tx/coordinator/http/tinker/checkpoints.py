"""Routes that save, load, copy, list, publish and delete checkpoints."""

from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
from litestar import Controller, delete, get, post, put
from litestar.params import FromPath, FromQuery, JSONBody
from litestar.status_codes import HTTP_200_OK

from spmd_tx.coordinator.bases.bases import check_same_base
from spmd_tx.coordinator.catalog import catalog, checkpoint_search, listings
from spmd_tx.coordinator.checkpoints import age_recipients
from spmd_tx.coordinator.http.answer_guard import in_turn, take_turn
from spmd_tx.coordinator.http.authentication import READS
from spmd_tx.coordinator.http.services import Addressed, ApiCall, accepts_work
from spmd_tx.coordinator.http.tinker.bodies import read_json
from spmd_tx.coordinator.http.tinker.models import queue_model
from spmd_tx.coordinator.http.tinker.training import problem_of, queue_training
from spmd_tx.coordinator.sampling.versions import check_rank
from spmd_tx.coordinator.training.optimizers import config_of, of_loaded
from spmd_tx.coordinator.wire import checkpoint_paths, limits
from spmd_tx.coordinator.wire.checkpoint_paths import CheckpointPath
from spmd_tx.coordinator.wire.checkpoints import (
    CheckpointSearchRequest,
    CheckpointSearchResponse,
    CheckpointsResponse,
    CopyWeightsRequest,
    CopyWeightsResponse,
    SaveWeightsExternalRequest,
    SetTtlRequest,
    WeightsInfoRequest,
    WeightsInfoResponse,
)
from spmd_tx.coordinator.wire.fields import StatusResponse
from spmd_tx.coordinator.wire.futures import FutureResponse
from spmd_tx.coordinator.wire.page_room import PageRoom
from spmd_tx.coordinator.wire.training import (
    LoadWeightsRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from spmd_tx.errors import InvalidRequest

CHECKPOINT = "/training_runs/{run_id:str}/checkpoints/{kind:str}/{name:str}"


class CheckpointsController(Controller):
    @post("/save_weights", status_code=HTTP_200_OK, guards=[accepts_work])
    async def save_weights(self, call: ApiCall) -> FutureResponse:
        """Queue a checkpoint to continue training from."""
        save = await read_json(call, SaveWeightsRequest)
        payload = msgspec.json.encode(save)
        return await queue_training(call, "save_weights", save.model_id, save.seq_id, payload)

    @post("/save_weights_for_sampler", status_code=HTTP_200_OK, guards=[accepts_work])
    async def save_weights_for_sampler(self, call: ApiCall) -> FutureResponse:
        """Queue a version to sample from: a named checkpoint, or one for a single sampling session."""
        save = await read_json(call, SaveWeightsForSamplerRequest)
        kind, payload = "save_weights_for_sampler", msgspec.json.encode(save)
        number = 0 if save.path is not None else save.sampling_session_seq_id or 0
        name, limit = "sampling_session_seq_id", "samplers_per_session"
        problem = problem_of(partial(limits.check_number, name, number, call.bounds, limit))
        return await queue_training(call, kind, save.model_id, save.seq_id, payload, problem)

    @post("/load_weights", status_code=HTTP_200_OK, guards=[accepts_work])
    async def load_weights(self, call: ApiCall) -> FutureResponse:
        """Queue loading into a model that exists, or into a new one of a session."""
        load = await read_json(call, LoadWeightsRequest)
        # The token is checked here, since a secret must not be written to the log.
        token, load = load.weights_access_token, msgspec.structs.replace(load, weights_access_token=None)
        if load.model_id is not None and load.seq_id is not None:
            kind, payload = "load_weights", msgspec.json.encode(load)
            await call.model(load.model_id)  # before work for what may be another's
            problem = await call.problem_loading(load.path, token, call.services.keyring)
            return await queue_training(call, kind, load.model_id, load.seq_id, payload, problem)
        if load.session_id is not None and load.model_seq_id is not None:
            return await _create_from_checkpoint(call, load, token)
        raise InvalidRequest("send model_id and seq_id, or session_id and model_seq_id to create a model")

    @post("/save_weights_external", status_code=HTTP_200_OK, guards=[accepts_work])
    async def save_weights_external(self, call: ApiCall) -> FutureResponse:
        """Queue an export for download."""
        save = await read_json(call, SaveWeightsExternalRequest)
        await call.model(save.model_id)
        kind, payload = "save_weights_external", msgspec.json.encode(save)
        recipients = save.age_encryption_recipients or []
        most, length = call.bounds.age_recipients, call.bounds.age_recipient_characters
        problem = problem_of(
            partial(age_recipients.check_bounds, recipients, most, length),
            partial(age_recipients.check_recipients, recipients),
        )
        if problem is not None:  # keep long invalid input out of the log
            payload = msgspec.json.encode(msgspec.structs.replace(save, age_encryption_recipients=[]))
        return await queue_training(call, kind, save.model_id, save.seq_id, payload, problem)

    @post("/copy_weights", status_code=HTTP_200_OK, guards=[accepts_work])
    async def copy_weights(self, data: JSONBody[CopyWeightsRequest], call: ApiCall) -> CopyWeightsResponse:
        """Copy a checkpoint at once. The same X-Idempotency-Key returns the same copy."""
        token = call.request.headers.get("x-tinker-weights-access-token", data.weights_access_token)
        reader = call.reading_with(token, call.services.keyring)
        key = call.request.headers.get("x-idempotency-key")
        if data.session_id is None:  # the copy gets a session of its own
            await call.services.quotas.check_session(call.caller, len(data.destination_project_id or ""))
        limits.check_number("model_seq_id", data.model_seq_id or 0, call.bounds, "models_per_session")
        path = await call.services.copies.make(data, key, call, reader)
        details = {"tinker_path": str(path), "copied_from": data.source_path}
        await call.note("checkpoint_copied", call.caller.owner, **details)
        return CopyWeightsResponse(str(path))

    @post("/weights_info", status_code=HTTP_200_OK, opt=READS)
    async def weights_info(self, data: JSONBody[WeightsInfoRequest], call: ApiCall) -> WeightsInfoResponse:
        """Return what a client must know to load a checkpoint: base model, rank and adapted parts."""
        manifest = await call.describe_checkpoint(checkpoint_paths.parse(data.tinker_path))
        return WeightsInfoResponse(
            base_model=manifest.base_model,
            is_lora=manifest.rank > 0,
            lora_rank=manifest.rank,
            train_unembed=manifest.train_unembed,
            train_mlp=manifest.train_mlp,
            train_attn=manifest.train_attn,
            optimizer_config=config_of(manifest.optimizer),
        )

    @get("/checkpoints", guards=[in_turn])
    async def checkpoints(
        self, call: ApiCall, limit: FromQuery[int] = 100, offset: FromQuery[int] = 0
    ) -> CheckpointsResponse:
        """List checkpoints, newest first."""
        page, room = listings.ListingPage(offset, limit), PageRoom(call.bounds.answer_bytes)
        return await listings.checkpoints(call.services.database, page, call.caller, room)

    @post("/checkpoints/search", status_code=HTTP_200_OK, opt=READS)
    async def search(
        self, data: JSONBody[CheckpointSearchRequest], call: ApiCall
    ) -> CheckpointSearchResponse:
        """Search checkpoints by project, metadata, kind, owner and base model."""
        await take_turn(call.request, "pages")
        return await checkpoint_search.search(call.services.database, data, call.caller, call.bounds)

    @get("/training_runs/{run_id:str}/checkpoints", guards=[in_turn])
    async def run_checkpoints(
        self, run_id: FromPath[str], call: ApiCall, offset: FromQuery[int] = 0
    ) -> CheckpointsResponse:
        """List the checkpoints of a run, which may have outlived it. A cursor says where more begin."""
        checkpoint_paths.check_name("a training run", run_id)
        room = PageRoom(call.bounds.answer_bytes)
        page = await listings.run_checkpoints(call.services.database, run_id, call.caller, offset, room)
        if not page.checkpoints and not (page.cursor and page.cursor.total_count):
            await call.model(run_id)
        return page

    @delete(CHECKPOINT, status_code=HTTP_200_OK)
    async def delete_checkpoint(self, address: Addressed, call: ApiCall) -> StatusResponse:
        """Delete a checkpoint for good."""
        return await _change(call, "checkpoint_deleted", address, call.checkpoints.delete)

    @put(CHECKPOINT + "/ttl")
    async def set_ttl(
        self, address: Addressed, data: JSONBody[SetTtlRequest], call: ApiCall
    ) -> StatusResponse:
        """Set how long a checkpoint is kept from now on; null: for ever."""
        seconds, change = data.ttl_seconds, call.checkpoints.set_ttl
        return await _change(call, "checkpoint_ttl_set", address, change, seconds, ttl_seconds=seconds)

    @post(CHECKPOINT + "/publish", status_code=HTTP_200_OK)
    async def publish(self, address: Addressed, call: ApiCall) -> StatusResponse:
        """Let everybody who knows the path use a checkpoint."""
        return await _change(call, "checkpoint_published", address, call.checkpoints.set_public, True)

    @delete(CHECKPOINT + "/publish", status_code=HTTP_200_OK)
    async def unpublish(self, address: Addressed, call: ApiCall) -> StatusResponse:
        """Take back a publication. What was loaded before stays."""
        return await _change(call, "checkpoint_unpublished", address, call.checkpoints.set_public, False)

    @post(CHECKPOINT + "/best", status_code=HTTP_200_OK)
    async def mark_best(self, address: Addressed, call: ApiCall) -> StatusResponse:
        """Mark a checkpoint as the best of its run. The mark moves there from the one that had it."""
        return await _change(call, "checkpoint_marked_best", address, call.checkpoints.set_best, True)

    @delete(CHECKPOINT + "/best", status_code=HTTP_200_OK)
    async def unmark_best(self, address: Addressed, call: ApiCall) -> StatusResponse:
        """Take the mark away from the best checkpoint of a run."""
        return await _change(call, "checkpoint_unmarked_best", address, call.checkpoints.set_best, False)


async def _change(
    call: ApiCall,
    event: str,
    path: CheckpointPath,
    change: Callable[..., Awaitable[object]],
    *values: object,
    **details: object,
) -> StatusResponse:
    """Change a checkpoint, if the caller may, and record it."""
    owner = (await call.checkpoint(path)).owner
    await change(path, *values)
    await call.note(event, owner, tinker_path=str(path), **details)
    return StatusResponse("ok")


async def _create_from_checkpoint(
    call: ApiCall, request: LoadWeightsRequest, token: str | None
) -> FutureResponse:
    """Queue a new model with the adapter shape of a checkpoint, and load the checkpoint into it."""
    path = checkpoint_paths.parse_to_train(request.path, optimizer=request.optimizer)
    reader = call.reading_with(token, call.services.keyring)
    wanted = None if request.base_model is None else call.services.bases.need(request.base_model)
    base, opened = await reader.open_checkpoint(path, call.services.bases)
    check_same_base(path, base, wanted)
    named = call.services.bases.need_to_train(request.base_model or base.name)
    adapter = of_loaded(opened.manifest.adapter, request)
    check_rank(path, adapter, base.limits.max_rank)
    assert request.session_id is not None
    assert request.model_seq_id is not None
    model_id = catalog.model_id(request.session_id, request.model_seq_id)
    filled = msgspec.structs.replace(request, model_id=model_id, seq_id=0)
    return await queue_model(call, named.name, filled, adapter)
