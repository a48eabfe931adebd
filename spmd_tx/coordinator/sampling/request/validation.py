"""Validates sample requests before they reach a worker. Pure; raises InvalidRequest."""

from collections.abc import Sequence

from spmd_tx.bounds import Bounds
from spmd_tx.coordinator.sampling.request import prompt_scores
from spmd_tx.coordinator.wire.limits import WHO_SEES, Limits, vocabulary
from spmd_tx.coordinator.wire.sampling import ChunkKind, ModelInput, SampleRequest, SamplingParams
from spmd_tx.errors import InvalidRequest, PromptTooLong

MAX_SAMPLES = 1024  # of one request
HOTTEST = 3e38  # a temperature that is finite in float32


def check_sample(request: SampleRequest, limits: Limits) -> None:
    """Raise InvalidRequest unless prompt, counts and parameters can be sampled."""
    if not 1 <= request.num_samples <= MAX_SAMPLES:
        raise InvalidRequest(f"num_samples is {request.num_samples}; it must be between 1 and {MAX_SAMPLES}")
    prompt_length, is_scored = _check_prompt(request.prompt, limits), prompt_scores.are_wanted(request)
    _check_sampling_params(request.sampling_params, limits, is_scored)
    _check_length(prompt_length, request.sampling_params.max_tokens, limits, is_scored)
    each = request.sampling_params.max_tokens or most_drawn(prompt_length, limits.max_context)
    prompt_scores.check(request, prompt_length, each * request.num_samples, limits.vocab_size)


def _check_prompt(prompt: ModelInput, limits: Limits) -> int:
    length = prompt.length
    if length > limits.max_context:
        return length  # is refused for that, and may have millions of tokens
    for chunk in prompt.chunks:
        if chunk.kind == "stored_image" and limits.images is not None:
            continue
        if chunk.tokens is None or chunk.kind != "encoded_text":
            raise InvalidRequest(
                f"the prompt holds a chunk of kind {chunk.kind!r}; {taken(chunk.kind, limits)}"
            )
        if chunk.tokens and not 0 <= min(chunk.tokens) <= max(chunk.tokens) < limits.vocab_size:
            wrong = next(token for token in chunk.tokens if not 0 <= token < limits.vocab_size)
            raise InvalidRequest(f"the prompt has the token ID {wrong}; {vocabulary(limits)}")
    if not length:
        raise InvalidRequest("the prompt is empty; send at least one token")
    if prompt.images and prompt.images[-1].end == length:
        raise InvalidRequest("the prompt ends with an image; send at least one token of text behind it")
    return length


def taken(kind: ChunkKind, limits: Limits) -> str:
    """Say what to send instead of a chunk of a kind that is not taken."""
    if limits.images is None:
        remedy = (
            "this model takes text, so send encoded_text chunks only, with tokens and nothing else in them"
        )
        return f"{remedy} {WHO_SEES}" if kind == "image" else remedy
    if kind == "image_asset_pointer":
        return "images are never fetched, so send the file itself, as an image chunk with data"
    if kind == "dmel":
        return "this model takes text and images, and no audio"
    return "send encoded_text chunks with tokens, and image chunks with data, and nothing else in them"


def most_drawn(prompt_length: int, max_context: int) -> int:
    """Return how many tokens may be drawn behind a prompt.

    Behind one that fills the context there is one, which is never read: clients that want nothing but scores
    of the prompt ask for it.
    """
    return max(1, max_context - prompt_length)


def _check_sampling_params(params: SamplingParams, limits: Limits, is_scored: bool) -> None:
    fewest = 0 if is_scored else 1
    refusals = {
        "temperature": (
            0 <= params.temperature <= HOTTEST,
            "a finite number, at least 0 (0 is greedy), and at most 3e38",
        ),
        "top_p": (0 < params.top_p <= 1, "above 0 and at most 1 (1 is off)"),
        "top_k": (params.top_k == -1 or params.top_k >= 1, "at least 1, or -1 (off)"),
        "max_tokens": (
            params.max_tokens is None or params.max_tokens >= fewest,
            f"at least {fewest}, or left out",
        ),
        "seed": (params.seed is None or -(2**63) <= params.seed < 2**64, "a 64-bit integer"),
    }
    for name, (is_allowed, allowed) in refusals.items():
        if not is_allowed:
            raise InvalidRequest(f"sampling_params.{name} is {getattr(params, name)}; it must be {allowed}")
    _check_stop(params.stop, limits)


def _check_stop(stop: str | list[str | int] | None, limits: Limits) -> None:
    stops = stop if isinstance(stop, list) else [] if stop is None else [stop]
    if len({type(item) for item in stops}) > 1:
        raise InvalidRequest("sampling_params.stop mixes strings and token IDs; send one kind")
    check_stop_strings([item for item in stops if isinstance(item, str)], limits.bounds)
    ids = [item for item in stops if isinstance(item, int)]
    _refuse_more(f"sampling_params.stop has {len(ids)} token IDs", len(ids), limits.bounds, "stop_tokens")
    for item in ids:
        if not 0 <= item < limits.vocab_size:
            raise InvalidRequest(f"sampling_params.stop has the token ID {item}; {vocabulary(limits)}")


def check_stop_strings(strings: Sequence[str], bounds: Bounds) -> None:
    """Limit the strings that are searched for in the text of every sample."""
    _refuse_more(f"stop has {len(strings)} strings", len(strings), bounds, "stop_strings")
    for string in strings:
        if string == "":
            raise InvalidRequest(
                "stop has an empty string, which would stop everything; leave it out, "
                "or send [] to switch all stops off"
            )
        size = len(string.encode())
        _refuse_more(f"stop has a string of {size} bytes", size, bounds, "stop_string_bytes")


def _refuse_more(has: str, number: int, bounds: Bounds, limit: str) -> None:
    """Raise InvalidRequest if a number is above a limit, which has this name."""
    if number > getattr(bounds, limit):
        raise InvalidRequest(
            f"{has}; at most {getattr(bounds, limit)} are allowed (the operator raises the limit {limit})"
        )


def _check_length(prompt_length: int, max_tokens: int | None, limits: Limits, is_scored: bool) -> None:
    """Require room for what is drawn. A prompt whose scores are wanted may fill the context."""
    longest = limits.max_context if is_scored else limits.max_context - 1
    if prompt_length > longest:
        drawn = "" if is_scored else ", one of them to be drawn"
        raise PromptTooLong(
            f"the prompt is too long: it has {prompt_length} tokens and the context holds "
            f"{limits.max_context}{drawn}; shorten it to {longest} or less"
        )
    room = most_drawn(prompt_length, limits.max_context)
    if max_tokens is not None and max_tokens > room:
        raise InvalidRequest(
            f"the prompt is too long for max_tokens {max_tokens}: it has {prompt_length} tokens and the "
            f"context holds {limits.max_context}; send max_tokens {room} or less, or a shorter prompt"
        )
