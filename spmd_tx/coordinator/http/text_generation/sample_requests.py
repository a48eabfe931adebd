"""Makes sample requests of what the APIs that answer in text ask for. Pure; raises InvalidRequest."""

from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from spmd_tx.coordinator.http.text_generation.prompts import ChatPrompt
from spmd_tx.coordinator.sampling.request import validation
from spmd_tx.coordinator.wire.limits import Limits
from spmd_tx.coordinator.wire.sampling import ModelInput, ModelInputChunk, SampleRequest, SamplingParams
from spmd_tx.errors import PromptTooLong


class DrawSettings(msgspec.Struct, frozen=True):
    """Holds what requests of all dialects say of how tokens are drawn. None: as without a setting."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None


def sampling_params(
    request: msgspec.Struct, stops: Sequence[str], end_of_text: Sequence[int], limits: Limits
) -> SamplingParams:
    """Return parameters. End-of-text tokens always stop a sample, as clients of these APIs expect."""
    validation.check_stop_strings(list(stops), limits.bounds)
    settings = msgspec.convert(request, DrawSettings, from_attributes=True)
    return SamplingParams(
        seed=settings.seed,
        stop=[*stops, *end_of_text] if stops else None,
        temperature=1.0 if settings.temperature is None else settings.temperature,
        top_k=settings.top_k or -1,
        top_p=1.0 if settings.top_p is None else settings.top_p,
    )


def chat_tokens(asked: int | None, prompt: Sequence[int], limits: Limits) -> int | None:
    """Return the most tokens to draw for a chat; None: as many as fit in the context.

    Agents ask for more than that, and mean the same.
    """
    room = limits.max_context - len(prompt)
    if room < 1:
        raise PromptTooLong.by(len(prompt), limits.max_context)
    return None if asked is None else min(asked, room)


def chat_sample(
    prompt: ChatPrompt,
    request: msgspec.Struct,
    most: int | None,
    limits: Limits,
    num_samples: int = 1,
    topk_sample_logprobs: int | None = None,
) -> SampleRequest:
    """Return the request for replies of at most so many tokens."""
    params = sampling_params(request, prompt.stops, prompt.text.eos_token_ids, limits)
    sample = SampleRequest(
        prompt=ModelInput([ModelInputChunk(tokens=prompt.tokens)]),
        sampling_params=replace(params, max_tokens=chat_tokens(most, prompt.tokens, limits)),
        num_samples=num_samples,
        topk_sample_logprobs=topk_sample_logprobs,
    )
    check(sample, limits)
    return sample


def check(sample: SampleRequest, limits: Limits) -> None:
    """Check a request without its stops: they mix strings and ids, which the SDK may not do."""
    validation.check_sample(
        replace(sample, sampling_params=replace(sample.sampling_params, stop=None)), limits
    )
