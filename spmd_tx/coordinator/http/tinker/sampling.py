"""Routes for sampling sessions and sample requests."""

import msgspec
from litestar import Controller, get, post
from litestar.params import FromPath, JSONBody
from litestar.status_codes import HTTP_200_OK

from spmd_tx.coordinator.bases.bases import check_same_base
from spmd_tx.coordinator.bases.served_base import ServedBase
from spmd_tx.coordinator.catalog.catalog import SamplerWeights
from spmd_tx.coordinator.http.authentication import PROMPTS
from spmd_tx.coordinator.http.services import ApiCall, Services, accepts_work, check_running
from spmd_tx.coordinator.images import arrival
from spmd_tx.coordinator.requests.backlog import most_tokens
from spmd_tx.coordinator.runtime.threads import compute
from spmd_tx.coordinator.sampling.request import validation
from spmd_tx.coordinator.storage.tables import SamplerRow
from spmd_tx.coordinator.wire import checkpoint_paths, limits
from spmd_tx.coordinator.wire.futures import (
    FutureResponse,
    JoinSamplingSessionRequest,
    JoinSamplingSessionResponse,
)
from spmd_tx.coordinator.wire.sampling import (
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    SampleRequest,
    SamplerResponse,
)
from spmd_tx.errors import InvalidRequest


class SamplingController(Controller):
    @post("/create_sampling_session", status_code=HTTP_200_OK, guards=[accepts_work])
    async def create_sampling_session(
        self, data: JSONBody[CreateSamplingSessionRequest], call: ApiCall
    ) -> CreateSamplingSessionResponse:
        """Choose what to sample from: a saved checkpoint or the base model."""
        number = data.sampling_session_seq_id
        limits.check_number("sampling_session_seq_id", number, call.bounds, "samplers_per_session")
        await call.open_session(data.session_id)
        named = None if data.base_model is None else call.services.bases.need(data.base_model)
        if data.model_path is not None:
            path = checkpoint_paths.parse_to_sample(data.model_path)
            base, _ = await call.open_checkpoint(path, call.services.bases)
            check_same_base(path, base, named)
            name, weights = base.name, SamplerWeights(str(path))
        elif named is not None:
            name, weights = named.name, SamplerWeights()
        else:
            raise InvalidRequest("neither model_path nor base_model is given; send one of them")
        sampler = await call.services.catalog.add_sampler(data.session_id, number, name, weights)
        return CreateSamplingSessionResponse(sampler.id)

    @get("/samplers/{sampler_id:str}")
    async def sampler(self, sampler_id: FromPath[str], call: ApiCall) -> SamplerResponse:
        """Return what a sampling client samples from."""
        sampler = await call.sampler(sampler_id)
        return SamplerResponse(sampler.id, sampler.base_model, sampler.model_path)

    @post("/join_sampling_session", status_code=HTTP_200_OK, guards=[accepts_work])
    async def join_sampling_session(
        self, data: JSONBody[JoinSamplingSessionRequest], call: ApiCall
    ) -> JoinSamplingSessionResponse:
        """Give a copy of a sampling client, in another process, request numbers of its own."""
        sampler = await call.sampler(data.sampling_session_id)
        await _check_open(sampler, call.services)
        return JoinSamplingSessionResponse(await call.services.catalog.join_sampler(sampler))

    @post("/asample", status_code=HTTP_200_OK, guards=[accepts_work], opt=PROMPTS)
    async def asample(self, data: JSONBody[SampleRequest], call: ApiCall) -> FutureResponse:
        """Queue samples of one prompt. Invalid requests are refused here, not through the future."""
        if data.sampling_session_id is None or data.seq_id is None:
            raise InvalidRequest(
                "sampling_session_id or seq_id is missing; use a tinker SDK of version 0.3 or newer, "
                "which creates a sampling session first"
            )
        if data.grammar is not None:
            raise InvalidRequest(
                "grammar is not part of the Tinker API; leave it out, or send it to OpenAI's chat/completions"
            )
        size, number = len(await call.request.body()), data.seq_id
        sampler = await call.sampler(data.sampling_session_id)
        base = call.services.bases.of_row(sampler.base_model)
        _check_same(data, sampler, base, call.services)
        check_running(call.services, base)
        prompt, images = await compute(size, arrival.of_prompt, data.prompt, base.limits)
        data = msgspec.structs.replace(data, prompt=prompt)
        await compute(size, validation.check_sample, data, base.limits)
        await _check_open(sampler, call.services)
        is_base = sampler.model_path is None and sampler.model_id is None
        sample = msgspec.structs.replace(
            data, model_path=sampler.model_path, base_model=sampler.base_model if is_base else None
        )
        payload = await compute(size, msgspec.json.encode, sample)
        tokens = most_tokens(sample, base.model.max_context)
        async with call.services.quotas.room_for_sample(call.caller, tokens):
            request_id = await call.services.queue.submit(
                *("sample", sampler.id, number, sampler.session_id, payload),
                base=base.key,
                images=images,
                tokens=tokens,
            )
        ids = [f"{request_id}:{place}" for place in range(data.num_samples)]
        return FutureResponse(request_id, sample_sequence_ids=ids)


def _check_same(sample: SampleRequest, sampler: SamplerRow, base: ServedBase, services: Services) -> None:
    """Raise InvalidRequest for a request that names other weights than those of its sampling session."""
    if sample.model_path not in (None, sampler.model_path):
        raise InvalidRequest(
            f"model_path is {sample.model_path!r}, and this sampling session samples from "
            f"{sampler.model_path or sampler.base_model!r}; leave it out, or make a session for it"
        )
    if sample.base_model is not None and services.bases.need(sample.base_model).base is not base:
        raise InvalidRequest(
            f"base_model is {sample.base_model!r}, and this sampling session is one of "
            f"{sampler.base_model!r}; leave it out, or make a session for it"
        )


async def _check_open(sampler: SamplerRow, services: Services) -> None:
    problem = await services.catalog.problem(sampler)
    if problem is not None:
        raise InvalidRequest(problem)
