"""Routes of Anthropic's API: messages, the count of their tokens, and models."""

from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
from litestar import Controller, Response, get, post
from litestar.params import FromPath, JSONBody
from litestar.status_codes import HTTP_200_OK

from spmd_tx.coordinator.catalog import listings
from spmd_tx.coordinator.http.anthropic import blocks, fields, prompting
from spmd_tx.coordinator.http.anthropic.blocks import MessageEvents, MessageHead
from spmd_tx.coordinator.http.anthropic.schemas import (
    MessagesRequest,
    ModelEntries,
    ModelEntry,
    TokenCount,
    TokenCountRequest,
)
from spmd_tx.coordinator.http.authentication import PROMPTS, READS
from spmd_tx.coordinator.http.services import ApiCall, accepts_work
from spmd_tx.coordinator.http.text_generation.event_streams import stream_events
from spmd_tx.coordinator.http.text_generation.generation import begin_chat
from spmd_tx.coordinator.http.text_generation.kept_turns import kept_turns, with_settings
from spmd_tx.coordinator.http.text_generation.sample_requests import chat_sample
from spmd_tx.coordinator.http.text_generation.whole_replies import whole_reply
from spmd_tx.coordinator.wire.training_protobuf import JSON


class MessagesController(Controller):
    @get("/models")
    async def entries(self, call: ApiCall) -> ModelEntries:
        """List the base models, and the newest checkpoints that can be sampled."""
        base = [_entry(name, 0) for each in call.services.bases.all for name in each.names.names]
        checkpoints = await listings.sampler_checkpoints(call.services.database, call.caller)
        data = [*base, *(_entry(row.tinker_path, row.created_at) for row in checkpoints)]
        return ModelEntries(data, data[0].id, data[-1].id)

    @get("/models/{model:path}")
    async def entry(self, model: FromPath[Path], call: ApiCall) -> ModelEntry:
        """Return the base model, or a checkpoint that can be sampled."""
        sent = unquote(call.request.scope["raw_path"].decode("latin-1").partition("/models/")[2])
        name = sent or str(model)
        weights = await call.services.implicit_samplers.find(name, call)
        return _entry(name, weights.saved_at)

    @post("/messages/count_tokens", status_code=HTTP_200_OK, opt=PROMPTS | READS)
    async def count_tokens(self, data: JSONBody[TokenCountRequest], call: ApiCall) -> TokenCount:
        """Count the tokens of a prompt."""
        body = await call.request.body()
        fields.check(body, data)
        base = (await call.services.implicit_samplers.find(data.model, call)).base
        open_seal = partial(call.services.turn_seals.open, call.caller.owner)
        return TokenCount(len((await prompting.make(data, [], len(body), base, open_seal)).tokens))

    @post("/messages", status_code=HTTP_200_OK, guards=[accepts_work], opt=PROMPTS)
    async def messages(self, data: JSONBody[MessagesRequest], call: ApiCall) -> Response[Any]:
        """Write the next message of a conversation."""
        body, owner = await call.request.body(), call.caller.owner
        kept = await kept_turns(call, "messages", data.model)
        data = with_settings(data, kept)
        fields.check(body, data)
        sampler = await call.services.implicit_samplers.of(data.model, call)
        stops, base = data.stop_sequences or [], sampler.base
        open_seal = partial(call.services.turn_seals.open, owner)
        prompt = await prompting.make(data, stops, len(body), base, open_seal, kept)
        sample = chat_sample(prompt, data, data.max_tokens, base.limits)
        generation = await begin_chat(prompt, sample, sampler, call)
        (request_id,) = generation.stream.request_ids
        seal = call.services.turn_seals.seal(owner, f"{request_id}:0")
        head = MessageHead(f"msg_{request_id}", data.model, seal, len(prompt.tokens))
        if data.stream:
            return stream_events(generation, MessageEvents(head, generation.stream.cached_so_far))
        message = blocks.whole_message(head, await whole_reply(generation, call.request))
        return Response(msgspec.json.encode(message), media_type=JSON)


def _entry(name: str, created_at: float) -> ModelEntry:
    return ModelEntry(name, name, datetime.fromtimestamp(created_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"))
