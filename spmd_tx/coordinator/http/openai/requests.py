"""Converts OpenAI's requests to sample requests, and refuses invalid ones. Pure; raises InvalidRequest."""

from collections.abc import Sequence

from msgspec.structs import replace

from spmd_tx.coordinator.http.openai import fields
from spmd_tx.coordinator.http.openai.schemas import ChatRequest, CompletionRequest, Parameters
from spmd_tx.coordinator.http.text_generation.sample_requests import check as check_sample
from spmd_tx.coordinator.http.text_generation.sample_requests import sampling_params
from spmd_tx.coordinator.requests.backlog import most_cells
from spmd_tx.coordinator.sampling.request.prompt_scores import MOST_CELLS, MOST_PER_TOKEN
from spmd_tx.coordinator.sampling.request.validation import MAX_SAMPLES
from spmd_tx.coordinator.wire.limits import Limits
from spmd_tx.coordinator.wire.sampling import ModelInput, ModelInputChunk, SampleRequest
from spmd_tx.errors import InvalidRequest

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default; chats have none


def check(request: CompletionRequest | ChatRequest, body: bytes) -> None:
    """Refuse fields that would be ignored otherwise, and fields that contradict each other."""
    fields.check(body, request)
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options is only for streams; leave it out, or set stream")
    name = "logprobs" if isinstance(request, CompletionRequest) else "top_logprobs"
    if not 0 <= top_logprobs(request) <= MOST_PER_TOKEN:
        raise InvalidRequest(
            f"{name} is {top_logprobs(request)}; it must be between 0 and {MOST_PER_TOKEN}, the number of "
            "most likely tokens to return"
        )
    if isinstance(request, ChatRequest):
        _check_chat(request)
    else:
        _check_echo(request)


def _check_echo(request: CompletionRequest) -> None:
    if request.echo and request.stream:
        raise InvalidRequest("echo is not offered for streams; leave out stream")
    if request.max_tokens == 0 and not request.echo:
        raise InvalidRequest(
            "max_tokens is 0, so there would be no answer; send 1 or more, or set echo to score the prompt"
        )


def _check_chat(request: ChatRequest) -> None:
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs is only for logprobs; leave it out, or set logprobs")
    options = request.chat_template_kwargs or {}
    for name in ("reasoning_effort", "tools"):
        if getattr(request, name) and name in options:
            raise InvalidRequest(f"{name} is given twice, once in chat_template_kwargs; send one of them")


def top_logprobs(request: CompletionRequest | ChatRequest) -> int:
    """Return how many of the likeliest tokens are wanted in the place of each drawn one."""
    if isinstance(request, CompletionRequest):
        return request.logprobs or 0
    return request.top_logprobs or 0


def completion_prompts(request: CompletionRequest, limits: Limits) -> list[str | list[int]]:
    """Return each prompt, as text or as tokens."""
    if isinstance(request.prompt, str):
        return [request.prompt]
    if not request.prompt:
        raise InvalidRequest("prompt is an empty list; send at least one prompt")
    most = max(limits.max_context, MAX_SAMPLES)
    if len(request.prompt) > most:
        raise InvalidRequest(
            f"prompt is a list of {len(request.prompt)}: the context holds {limits.max_context} tokens, and "
            f"{MAX_SAMPLES} prompts are taken at once; send fewer"
        )
    ids = [item for item in request.prompt if isinstance(item, int)]
    prompts = [item for item in request.prompt if not isinstance(item, int)]
    if ids and prompts:
        raise InvalidRequest("prompt mixes token IDs with prompts; send one list of IDs for each prompt")
    _check_choices(request, len(prompts))
    return [ids] if ids else prompts


def _check_choices(request: Parameters, prompts: int) -> None:
    choices = (request.n or 1) * prompts
    if choices > MAX_SAMPLES:
        raise InvalidRequest(
            f"{prompts} prompts with n {request.n or 1} make {choices} choices; at most {MAX_SAMPLES} "
            "are allowed, so send fewer prompts at once"
        )


def stop_strings(request: Parameters) -> list[str]:
    return [request.stop] if isinstance(request.stop, str) else list(request.stop or ())


def _max_tokens(request: CompletionRequest, prompt: Sequence[int], limits: Limits) -> int:
    if request.max_tokens is not None:
        return request.max_tokens
    least = 0 if request.echo else 1
    return min(DEFAULT_COMPLETION_TOKENS, max(least, limits.max_context - len(prompt)))


def sample_requests(
    request: CompletionRequest,
    prompts: Sequence[list[int]],
    end_of_text: Sequence[int],
    limits: Limits,
    grammar: str | None,
) -> list[SampleRequest]:
    """Return a request for each prompt, all with this grammar."""
    params, top = sampling_params(request, stop_strings(request), end_of_text, limits), request.logprobs or 0
    samples = [
        SampleRequest(
            prompt=ModelInput([ModelInputChunk(tokens=prompt)]),
            sampling_params=replace(params, max_tokens=_max_tokens(request, prompt, limits)),
            num_samples=request.n or 1,
            topk_sample_logprobs=top,
            prompt_logprobs=request.echo or None,
            topk_prompt_logprobs=top if request.echo else None,
            grammar=grammar,
        )
        for prompt in prompts
    ]
    for sample in samples:
        check_sample(sample, limits)
    _check_cells(prompts, samples, limits)
    return samples


def _check_cells(prompts: Sequence[list[int]], samples: Sequence[SampleRequest], limits: Limits) -> None:
    """Limit the likeliest tokens of all prompts together: one answer has them all."""
    of_prompts = sum(
        len(prompt) * (each.topk_prompt_logprobs or 0) for prompt, each in zip(prompts, samples, strict=True)
    )
    cells = of_prompts + sum(most_cells(each, limits.max_context) for each in samples)
    if len(samples) > 1 and cells > MOST_CELLS:
        raise InvalidRequest(
            f"{len(samples)} prompts with {samples[0].topk_sample_logprobs} likeliest tokens for each drawn "
            f"one make up to {cells} values; at most {MOST_CELLS} are given by one call, so send fewer "
            "prompts at once"
        )
