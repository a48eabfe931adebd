"""Routes of OpenAI's API: completions, chat completions and models."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from litestar import Controller, Request, Response, get, post
from litestar.background_tasks import BackgroundTask
from litestar.params import FromPath, JSONBody
from litestar.response import Stream
from litestar.status_codes import HTTP_200_OK, HTTP_500_INTERNAL_SERVER_ERROR
from msgspec import UNSET

from spmd_tx.coordinator.catalog import listings
from spmd_tx.coordinator.http.authentication import PROMPTS
from spmd_tx.coordinator.http.errors import status_of
from spmd_tx.coordinator.http.implicit_samplers import ImplicitSampler
from spmd_tx.coordinator.http.openai import answers, chat, errors, requests, writing
from spmd_tx.coordinator.http.openai.answers import (
    Answering,
    ChatFormat,
    CompletionFormat,
    ResponseFormat,
    TokenTextCache,
    WholeAnswer,
)
from spmd_tx.coordinator.http.openai.chat import ChatPrompt
from spmd_tx.coordinator.http.openai.choices import ChoiceProgress
from spmd_tx.coordinator.http.openai.detokenize import EchoedText
from spmd_tx.coordinator.http.openai.schemas import (
    ChatRequest,
    CompletionRequest,
    CompletionUsage,
    ModelCard,
    ModelList,
)
from spmd_tx.coordinator.http.openai.stream import KEEP_ALIVE_SECONDS, SampleStream, submit_samples
from spmd_tx.coordinator.http.security.access import Access
from spmd_tx.coordinator.http.services import Accessible, Service, Services, accepts_work
from spmd_tx.coordinator.requests.backlog import most_tokens
from spmd_tx.coordinator.runtime import containment
from spmd_tx.errors import SpmdTxError


@dataclass(frozen=True)
class CompletionCall:
    """Holds a request whose samples are being drawn."""

    request: CompletionRequest | ChatRequest
    prompts: list[list[int]]
    stream: SampleStream
    choices: list[ChoiceProgress]
    form: ResponseFormat

    async def usage(self) -> CompletionUsage:
        sent = sum(choice.sent for choice in self.choices)
        echoed = sum(map(len, self.prompts)) * (self.request.n or 1) if _echoes(self.request) else 0
        reasoning = sum(choice.reply.reasoning_tokens for choice in self.choices if choice.reply)
        return answers.usage(self.prompts, await self.stream.cached_tokens(), sent - echoed, reasoning)


class OpenAIController(Controller):
    path = "/oai/api/v1"

    @get("/models")
    async def models(self, services: Service, access: Accessible) -> ModelList:
        """List the base models, and the newest checkpoints that can be sampled."""
        base = [ModelCard(name, 0) for each in services.bases.all for name in each.names.names]
        checkpoints = await listings.sampler_checkpoints(services.database, access.caller)
        return ModelList([*base, *(ModelCard(row.tinker_path, int(row.created_at)) for row in checkpoints)])

    @get("/models/{model:path}")
    async def model(
        self, model: FromPath[Path], request: Request, services: Service, access: Accessible
    ) -> ModelCard:
        """Return the base model, or a checkpoint that can be sampled."""
        name = _name_in(request) or str(model)
        weights = await services.implicit_samplers.find(name, access)
        return ModelCard(name, int(weights.saved_at))

    @post("/completions", status_code=HTTP_200_OK, guards=[accepts_work], opt=PROMPTS)
    async def completions(
        self, data: JSONBody[CompletionRequest], request: Request, services: Service, access: Accessible
    ) -> Response[Any]:
        """Complete texts."""
        requests.check(data, await request.body())
        sampler = await services.implicit_samplers.of(data.model, access)
        inputs = requests.completion_prompts(data, sampler.base.limits)
        tokens = iter(
            await sampler.base.prompt_texts.tokens([each for each in inputs if isinstance(each, str)])
        )
        prompts = [each if isinstance(each, list) else next(tokens) for each in inputs]
        return await _answer(await _begin(data, prompts, sampler, services, access), request)

    @post("/chat/completions", status_code=HTTP_200_OK, guards=[accepts_work], opt=PROMPTS)
    async def chat_completions(
        self, data: JSONBody[ChatRequest], request: Request, services: Service, access: Accessible
    ) -> Response[Any]:
        """Write the next message of a conversation."""
        body = await request.body()
        requests.check(data, body)
        sampler = await services.implicit_samplers.of(data.model, access)
        text, base = await sampler.base.model.text.get(), sampler.base
        prompt = await chat.read(data, len(body), text, base.prompt_texts, base.limits.bounds)
        return await _answer(await _begin(data, [prompt.tokens], sampler, services, access, prompt), request)


def _name_in(request: Request) -> str:
    """Return the name of a model as it was sent: routing takes slashes out of it."""
    return unquote(request.scope["raw_path"].decode("latin-1").partition("/models/")[2])


async def _begin(
    request: CompletionRequest | ChatRequest,
    prompts: list[list[int]],
    sampler: ImplicitSampler,
    services: Services,
    access: Access,
    of_chat: ChatPrompt | None = None,
) -> CompletionCall:
    base = sampler.base
    text = await base.model.text.get()
    samples = requests.sample_requests(request, prompts, text.eos_token_ids, base.limits)
    tokens = sum(most_tokens(each, base.model.max_context) for each in samples)
    echoes = prompts if _echoes(request) else None
    async with services.quotas.room_for_sample(access.caller, tokens, len(samples)):
        stream = await submit_samples(services, sampler, samples, access.caller.owner, echoes)
    answering = Answering(
        id=f"{'chatcmpl' if of_chat else 'cmpl'}-{stream.request_ids[0]}",
        created=int(time.time()),
        model=request.model,
        texts=TokenTextCache(text.tokenizer),
        has_logprobs=request.logprobs is not None and request.logprobs is not False,
        has_token_ids=bool(request.return_token_ids),
        width=samples[0].topk_sample_logprobs or 0,
    )
    indices = range((request.n or 1) * len(prompts))
    if of_chat is not None:
        choices = [of_chat.choice(index, stream.request_ids[0]) for index in indices]
        form = ChatFormat(answering, of_chat.tokens if answering.has_token_ids else UNSET)
        return CompletionCall(request, prompts, stream, choices, form)
    stops, choices = requests.stop_strings(request), list[ChoiceProgress]()
    for index in indices:
        prompt = echoes[index // (request.n or 1)] if echoes else []
        shown = EchoedText(text.tokenizer, stops, len(prompt))
        choices.append(ChoiceProgress(index, shown, answering.has_logprobs))
    return CompletionCall(request, prompts, stream, choices, CompletionFormat(answering))


def _echoes(request: CompletionRequest | ChatRequest) -> bool:
    """Say whether the prompts stand before the answers."""
    return isinstance(request, CompletionRequest) and bool(request.echo)


async def _answer(call: CompletionCall, request: Request) -> Response[Any]:
    close = call.stream.close
    if call.request.stream:
        # The background task closes it even if nobody begins to read the stream.
        return Stream(_events(call), media_type="text/event-stream", background=BackgroundTask(close))
    try:
        await call.stream.finished(_hung_up(request))
        return await writing.response(_whole(call), close)
    except BaseException:
        close()
        raise


async def _whole(call: CompletionCall) -> AsyncIterator[bytes]:
    answer = WholeAnswer(call.form)
    yield answer.begin()
    async for piece in call.stream.pieces(call.choices):
        yield await writing.write(piece, partial(writing.of_whole, answer))
    yield answer.end(await call.usage())


async def _events(call: CompletionCall) -> AsyncIterator[bytes]:
    """Yield the events of a stream. Its status has been sent, so an error becomes an event."""
    written = partial(writing.events, call.form)
    clock = asyncio.get_running_loop().time
    last = clock()
    try:
        openings = [call.form.opening(choice.index) for choice in call.choices]
        if text := b"".join(answers.event(each) for each in openings if each is not None):
            yield text
        async for piece in call.stream.news(call.choices):
            text = b"" if piece is None else await writing.write(piece, written)
            if piece is None or (not text and clock() - last > KEEP_ALIVE_SECONDS):  # a long call is written
                text = answers.KEEP_ALIVE
            if text:
                last = clock()
                yield text
        options = call.request.stream_options
        if options is not None and options.include_usage:
            yield answers.event(call.form.last(await call.usage()))
    except SpmdTxError as error:
        yield answers.event(errors.error_body(str(error), status_of(error)))
    except BaseException as error:
        problem = containment.report(error, f"the stream of {', '.join(call.stream.request_ids[:1])}")
        yield answers.event(errors.error_body(problem, HTTP_500_INTERNAL_SERVER_ERROR))
    finally:
        call.stream.close()
    yield answers.DONE


async def _hung_up(request: Request) -> None:
    """Wait until the client disconnects. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
