"""Routes of OpenAI's API: completions, chat completions and models."""

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from litestar import Controller, Request, Response, get, post
from litestar.params import FromPath, JSONBody
from litestar.status_codes import HTTP_200_OK
from msgspec import UNSET

from spmd_tx.coordinator.catalog import listings
from spmd_tx.coordinator.grammar.answer_grammars import pattern_grammar
from spmd_tx.coordinator.http.authentication import IN_TRAJECTORY, PROMPTS
from spmd_tx.coordinator.http.implicit_samplers import ImplicitSampler
from spmd_tx.coordinator.http.openai import answers, chat, demands, requests
from spmd_tx.coordinator.http.openai.answers import (
    Answering,
    ChatFormat,
    CompletionFormat,
    ResponseFormat,
    WholeAnswer,
    token_texts,
)
from spmd_tx.coordinator.http.openai.completion_events import CompletionEvents
from spmd_tx.coordinator.http.openai.schemas import (
    ChatRequest,
    CompletionRequest,
    ModelCard,
    ModelList,
    Parameters,
)
from spmd_tx.coordinator.http.services import ApiCall, accepts_work
from spmd_tx.coordinator.http.text_generation import writing
from spmd_tx.coordinator.http.text_generation.choices import ChoiceProgress
from spmd_tx.coordinator.http.text_generation.detokenize import SampleText
from spmd_tx.coordinator.http.text_generation.event_streams import stream_events
from spmd_tx.coordinator.http.text_generation.generation import TextGeneration, begin, begin_chat
from spmd_tx.coordinator.http.text_generation.kept_turns import kept_turns, with_settings
from spmd_tx.coordinator.http.text_generation.sample_requests import chat_sample
from spmd_tx.coordinator.http.text_generation.sample_stream import SampleStream
from spmd_tx.coordinator.text.model_text import ModelText
from spmd_tx.errors import InvalidRequest


class OpenAIController(Controller):
    @get("/models")
    async def models(self, call: ApiCall) -> ModelList:
        """List the base models, and the newest checkpoints that can be sampled."""
        base = [ModelCard(name, 0) for each in call.services.bases.all for name in each.names.names]
        checkpoints = await listings.sampler_checkpoints(call.services.database, call.caller)
        return ModelList([*base, *(ModelCard(row.tinker_path, int(row.created_at)) for row in checkpoints)])

    @get("/models/{model:path}")
    async def model(self, model: FromPath[Path], call: ApiCall) -> ModelCard:
        """Return the base model, or a checkpoint that can be sampled."""
        name = _name_in(call.request) or str(model)
        weights = await call.services.implicit_samplers.find(name, call)
        return ModelCard(name, int(weights.saved_at))

    @post("/completions", status_code=HTTP_200_OK, guards=[accepts_work], opt=PROMPTS)
    async def completions(self, data: JSONBody[CompletionRequest], call: ApiCall) -> Response[Any]:
        """Complete texts."""
        if IN_TRAJECTORY in call.request.path_params:
            raise InvalidRequest(
                "trajectories keep chats only; send the prompt to chat/completions, or to the base URL of no "
                "trajectory"
            )
        requests.check(data, await call.request.body())
        sampler = await call.services.implicit_samplers.of(data.model, call)
        inputs = requests.completion_prompts(data, sampler.base.limits)
        tokens = iter(
            await sampler.base.prompt_texts.tokens([each for each in inputs if isinstance(each, str)])
        )
        prompts = [each if isinstance(each, list) else next(tokens) for each in inputs]
        generation, form = await _begin(data, prompts, sampler, call)
        return await _answer(data, generation, form, call.request)

    @post("/chat/completions", status_code=HTTP_200_OK, guards=[accepts_work], opt=PROMPTS)
    async def chat_completions(self, data: JSONBody[ChatRequest], call: ApiCall) -> Response[Any]:
        """Write the next message of a conversation."""
        body = await call.request.body()
        kept = await kept_turns(call, "chat", data.model)
        data = with_settings(data, kept)
        requests.check(data, body)
        sampler = await call.services.implicit_samplers.of(data.model, call)
        prompt = await chat.read(data, len(body), sampler.base, kept)
        most, limits = data.max_completion_tokens or data.max_tokens, sampler.base.limits
        sample = chat_sample(prompt, data, most, limits, data.n or 1, requests.top_logprobs(data))
        generation = await begin_chat(prompt, sample, sampler, call)
        answering = _answering(data, generation.stream, prompt.text)
        form = ChatFormat(answering, prompt.tokens if answering.has_token_ids else UNSET)
        return await _answer(data, generation, form, call.request)


def _name_in(request: Request) -> str:
    """Return the name of a model as it was sent: routing takes slashes out of it."""
    return unquote(request.scope["raw_path"].decode("latin-1").partition("/models/")[2])


async def _begin(
    request: CompletionRequest, prompts: list[list[int]], sampler: ImplicitSampler, call: ApiCall
) -> tuple[TextGeneration, CompletionFormat]:
    text, grammar = await sampler.base.model.text.get(), await _pattern(request, sampler)
    samples = requests.sample_requests(request, prompts, text.eos_token_ids, sampler.base.limits, grammar)
    echoes = prompts if request.echo else None
    stream = await begin(samples, sampler, call, echoes)
    answering = _answering(request, stream, text)
    stops, choices, count = requests.stop_strings(request), list[ChoiceProgress](), request.n or 1
    for index in range(count * len(prompts)):
        prompt = echoes[index // count] if echoes else []
        shown = SampleText(text.tokenizer, stops, prompt_tokens=len(prompt))
        choices.append(ChoiceProgress(index, shown, answering.has_logprobs))
    echoed = sum(map(len, prompts)) * count if echoes else 0
    return TextGeneration(prompts, stream, choices, echoed), CompletionFormat(answering)


def _answering(request: CompletionRequest | ChatRequest, stream: SampleStream, text: ModelText) -> Answering:
    prefix = "chatcmpl" if isinstance(request, ChatRequest) else "cmpl"
    return Answering(
        id=f"{prefix}-{stream.request_ids[0]}",
        created=int(time.time()),
        model=request.model,
        texts=token_texts(text.tokenizer),
        has_logprobs=request.logprobs is not None and request.logprobs is not False,
        has_token_ids=bool(request.return_token_ids),
        width=requests.top_logprobs(request),
    )


async def _pattern(request: Parameters, sampler: ImplicitSampler) -> str | None:
    """Return the grammar of completions, which is known to compile; None: they are free."""
    pattern = demands.pattern_of(request)
    if pattern is None:
        return None
    grammar = pattern_grammar(pattern)
    await sampler.base.grammars.compile(grammar)
    return grammar


async def _answer(
    asked: CompletionRequest | ChatRequest, generation: TextGeneration, form: ResponseFormat, request: Request
) -> Response[Any]:
    if asked.stream:
        options = asked.stream_options
        wants_usage = options is not None and bool(options.include_usage)
        indices = [choice.index for choice in generation.choices]
        return stream_events(generation, CompletionEvents(form, indices, wants_usage))
    try:
        await generation.stream.finished(request)
        return await writing.response(_whole(generation, form), generation.stream.close)
    except BaseException:
        generation.stream.close()
        raise


async def _whole(generation: TextGeneration, form: ResponseFormat) -> AsyncIterator[bytes]:
    answer = WholeAnswer(form)
    yield answer.begin()
    async for piece in generation.stream.pieces(generation.choices):
        yield await writing.write(piece, answer.piece)
    yield answer.end(answers.usage(await generation.usage()))
