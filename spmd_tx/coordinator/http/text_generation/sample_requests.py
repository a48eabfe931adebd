"""Makes sample requests of what the APIs that answer in text ask for. Pure; raises InvalidRequest."""

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from spmd_tx.coordinator.sampling.request import validation
from spmd_tx.coordinator.wire.limits import Limits
from spmd_tx.coordinator.wire.sampling import ModelInput, ModelInputChunk, SampleRequest, SamplingParams
from spmd_tx.errors import PromptTooLong


@dataclass(frozen=True, kw_only=True)
class DrawSettings:
    """Says how tokens are drawn. None stands for what happens without a setting."""

    stops: Sequence[str] = ()
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def params(self, end_of_text: Sequence[int], limits: Limits) -> SamplingParams:
        """Return parameters. End-of-text tokens always stop a sample, as clients of these APIs expect."""
        validation.check_stop_strings(list(self.stops), limits.bounds)
        return SamplingParams(
            seed=self.seed,
            stop=[*self.stops, *end_of_text] if self.stops else None,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k or -1,
            top_p=1.0 if self.top_p is None else self.top_p,
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
    prompt: list[int],
    settings: DrawSettings,
    most: int | None,
    end_of_text: Sequence[int],
    limits: Limits,
) -> SampleRequest:
    """Return the request for one reply of at most so many tokens."""
    params = replace(settings.params(end_of_text, limits), max_tokens=chat_tokens(most, prompt, limits))
    sample = SampleRequest(
        prompt=ModelInput([ModelInputChunk(tokens=prompt)]), sampling_params=params, num_samples=1
    )
    check(sample, limits)
    return sample


def check(sample: SampleRequest, limits: Limits) -> None:
    """Check a request without its stops: they mix strings and ids, which the SDK may not do."""
    validation.check_sample(
        replace(sample, sampling_params=replace(sample.sampling_params, stop=None)), limits
    )
