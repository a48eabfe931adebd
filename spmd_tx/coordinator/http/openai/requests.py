"""Converts OpenAI's requests to sample requests, and refuses invalid ones. Pure; raises InvalidRequest."""

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from spmd_tx.coordinator.http.openai.schemas import ChatRequest, CompletionRequest, Parameters
from spmd_tx.coordinator.sampling.request import validation
from spmd_tx.coordinator.sampling.request.prompt_scores import MOST_PER_TOKEN
from spmd_tx.coordinator.sampling.request.validation import MAX_SAMPLES
from spmd_tx.coordinator.wire.limits import Limits
from spmd_tx.coordinator.wire.sampling import ModelInput, ModelInputChunk, SampleRequest, SamplingParams
from spmd_tx.errors import InvalidRequest

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default; chats have none

# Fields that are not supported, with the values that have no effect.
_NOT_OFFERED: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
}


def check(request: Parameters) -> None:
    """Refuse fields that would be ignored otherwise."""
    for name, harmless in _NOT_OFFERED.items():
        value = getattr(request, name, None)
        if value is not None and value not in harmless:
            raise InvalidRequest(f"{name} is not offered by this server; leave it out")
    if request.stream_options is not None and not request.stream:
        raise InvalidRequest("stream_options is only for streams; leave it out, or set stream")
    name = "logprobs" if isinstance(request, CompletionRequest) else "top_logprobs"
    if not 0 <= _top_logprobs(request) <= MOST_PER_TOKEN:
        raise InvalidRequest(
            f"{name} is {_top_logprobs(request)}; it must be between 0 and {MOST_PER_TOKEN}, the number of "
            "most likely tokens to return"
        )
    if isinstance(request, ChatRequest) and request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs is only for logprobs; leave it out, or set logprobs")


def _top_logprobs(request: Parameters) -> int:
    """Return how many of the likeliest tokens are wanted in the place of each drawn one."""
    if isinstance(request, CompletionRequest):
        return request.logprobs or 0
    return (request.top_logprobs or 0) if isinstance(request, ChatRequest) else 0


def completion_prompts(request: CompletionRequest) -> list[str | list[int]]:
    """Return each prompt, as text or as tokens."""
    if isinstance(request.prompt, str):
        return [request.prompt]
    if not request.prompt:
        raise InvalidRequest("prompt is an empty list; send at least one prompt")
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


def chat_messages(request: ChatRequest) -> list[dict[str, Any]]:
    """Return the messages for the chat template."""
    return [_message(number, message) for number, message in enumerate(request.messages)]


def _message(number: int, message: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise InvalidRequest(f"message {number} has no role; send one that the model's chat template knows")
    content = message.get("content")
    if isinstance(content, list):
        return {**message, "content": "\n".join(_text(number, part) for part in content)}
    if content is not None and not isinstance(content, str):
        raise InvalidRequest(f"message {number}: content is {content!r}; send text, or a list of text parts")
    return {**message, "content": content or ""}


def _text(number: int, part: Any) -> str:
    kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else (part, None)
    if kind != "text" or not isinstance(text, str):
        raise InvalidRequest(f"message {number} has a part of type {kind!r}; this model takes parts of text")
    return text


def stop_strings(request: Parameters) -> list[str]:
    return [request.stop] if isinstance(request.stop, str) else list(request.stop or ())


def _max_tokens(
    request: CompletionRequest | ChatRequest, prompt: Sequence[int], limits: Limits
) -> int | None:
    """Return the most tokens to draw; None: as many as fit in the context."""
    if isinstance(request, ChatRequest):
        return request.max_completion_tokens or request.max_tokens
    return request.max_tokens or min(DEFAULT_COMPLETION_TOKENS, max(1, limits.max_context - len(prompt)))


def sample_requests(
    request: CompletionRequest | ChatRequest,
    prompts: Sequence[list[int]],
    end_of_text: Sequence[int],
    limits: Limits,
) -> list[SampleRequest]:
    """Return a request for each prompt. End-of-text tokens always stop it, as OpenAI's clients expect."""
    stops = stop_strings(request)
    validation.check_stop_strings(stops, limits.bounds)
    params = SamplingParams(
        seed=request.seed,
        stop=[*stops, *end_of_text] if stops else None,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_k=request.top_k or -1,
        top_p=1.0 if request.top_p is None else request.top_p,
    )
    wanted = []
    for prompt in prompts:
        sample = SampleRequest(
            prompt=ModelInput([ModelInputChunk(tokens=prompt)]),
            sampling_params=replace(params, max_tokens=_max_tokens(request, prompt, limits)),
            num_samples=request.n or 1,
            topk_sample_logprobs=_top_logprobs(request),
        )
        # Without the stops: they mix strings and ids, which the SDK may not do.
        validation.check_sample(
            replace(sample, sampling_params=replace(sample.sampling_params, stop=None)), limits
        )
        wanted.append(sample)
    return wanted
