"""Draws the samples of one call: checks quotas, submits the requests, and counts the tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from spmd_tx.coordinator.http.implicit_samplers import ImplicitSampler
from spmd_tx.coordinator.http.services import ApiCall
from spmd_tx.coordinator.http.text_generation.choices import ChoiceProgress
from spmd_tx.coordinator.http.text_generation.kept_turns import Keeping
from spmd_tx.coordinator.http.text_generation.prompts import ChatPrompt
from spmd_tx.coordinator.http.text_generation.sample_stream import Echoes, SampleStream, submit_samples
from spmd_tx.coordinator.requests.backlog import most_tokens
from spmd_tx.coordinator.wire.sampling import SampleRequest


@dataclass(frozen=True)
class TokenUsage:
    """Counts the tokens of a call. The token that ends a sample counts, too."""

    prompt: int
    cached: int  # those of the prompt that were found in the prefix cache
    sampled: int
    reasoning: int  # those of them up to the last one with reasoning


@dataclass(frozen=True)
class TextGeneration:
    """Holds a call whose samples are being drawn."""

    prompts: Sequence[list[int]]
    stream: SampleStream
    choices: list[ChoiceProgress]
    echoed_tokens: int = 0  # of prompts that stand before the samples

    async def usage(self) -> TokenUsage:
        """Count tokens. All samples must be drawn."""
        return TokenUsage(
            sum(map(len, self.prompts)),
            await self.stream.cached_tokens(),
            sum(choice.sent for choice in self.choices) - self.echoed_tokens,
            sum(choice.reply.reasoning_tokens for choice in self.choices if choice.reply),
        )


async def begin(
    samples: Sequence[SampleRequest],
    sampler: ImplicitSampler,
    call: ApiCall,
    echoes: Echoes = None,
    keeping: Keeping | None = None,
) -> SampleStream:
    """Submit sample requests, all or none. ``echoes`` are the prompts if they stand before the samples."""
    tokens = sum(most_tokens(each, sampler.base.model.max_context) for each in samples)
    async with call.services.quotas.room_for_sample(call.caller, tokens, len(samples)):
        return await submit_samples(call.services, sampler, samples, call.caller.owner, echoes, keeping)


async def begin_chat(
    prompt: ChatPrompt, sample: SampleRequest, sampler: ImplicitSampler, call: ApiCall
) -> TextGeneration:
    """Begin to draw the replies to a conversation."""
    sample, sampler = prompt.of_sample(sample), replace(sampler, images=prompt.files)
    if prompt.keeping is not None:
        sample = prompt.keeping.with_notes(sample)
    stream = await begin([sample], sampler, call, keeping=prompt.keeping)
    choices = [prompt.choice(index, stream.request_ids[0]) for index in range(sample.num_samples)]
    return TextGeneration([prompt.tokens], stream, choices)
