"""The route of OpenAI's Responses."""

import time
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
from litestar import Controller, Response, post
from litestar.params import JSONBody
from litestar.status_codes import HTTP_200_OK

from spmd_tx.coordinator.http.authentication import PROMPTS
from spmd_tx.coordinator.http.openai import response_fields, response_prompting
from spmd_tx.coordinator.http.openai.response_events import ResponseEvents
from spmd_tx.coordinator.http.openai.response_items import ResponseHead
from spmd_tx.coordinator.http.openai.response_schemas import ResponsesRequest
from spmd_tx.coordinator.http.services import ApiCall, accepts_work
from spmd_tx.coordinator.http.text_generation.event_streams import stream_events
from spmd_tx.coordinator.http.text_generation.generation import begin_chat
from spmd_tx.coordinator.http.text_generation.kept_turns import kept_turns, with_settings
from spmd_tx.coordinator.http.text_generation.sample_requests import chat_sample
from spmd_tx.coordinator.http.text_generation.whole_replies import whole_reply
from spmd_tx.coordinator.runtime.threads import compute
from spmd_tx.coordinator.wire.training_protobuf import JSON


class ResponsesController(Controller):
    @post("/responses", status_code=HTTP_200_OK, guards=[accepts_work], opt=PROMPTS)
    async def responses(self, data: JSONBody[ResponsesRequest], call: ApiCall) -> Response[Any]:
        """Write the next turn of a conversation, which is sent as a whole or behind an earlier answer."""
        body, owner = await call.request.body(), call.caller.owner
        kept = await kept_turns(call, "responses", data.model)
        kept = replace(kept, are_named=data.store is not False)
        data = with_settings(data, kept)
        response_fields.check(body, data)
        sampler = await call.services.implicit_samplers.of(data.model, call)
        base, size, open_seal = sampler.base, len(body), partial(call.services.turn_seals.open, owner)
        tools = await compute(size, response_prompting.offered_tools, data)
        prompt = await response_prompting.make(data, tools, size, base, open_seal, kept)
        sample = chat_sample(prompt, data, data.max_output_tokens, base.limits)
        generation = await begin_chat(prompt, sample, sampler, call)
        (request_id,) = generation.stream.request_ids
        seal = call.services.turn_seals.seal(owner, f"{request_id}:0")
        head = ResponseHead(request_id, int(time.time()), seal, tools.places, data)
        if data.stream:
            return stream_events(generation, ResponseEvents(head))
        reply = await whole_reply(generation, call.request)
        items = [head.item(part, number) for number, part in enumerate(reply.parts)]
        answer = head.ended(items, reply.finish, reply.usage)
        return Response(msgspec.json.encode(answer), media_type=JSON)
