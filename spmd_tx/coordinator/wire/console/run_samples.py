"""The samples of a run, as the console reads them. Times are seconds since the epoch."""

from typing import Literal

import msgspec

StopReason = Literal["stop", "length"]
SampleOrder = Literal["newest", "highest", "lowest"]  # the last two are of advantages


class Excerpt(msgspec.Struct, frozen=True):
    """Holds the beginning or the end of a text."""

    text: str
    tokens: int  # of the whole
    is_cut: bool


class ShortSample(msgspec.Struct, frozen=True):
    excerpt: Excerpt  # its beginning
    stop_reason: StopReason
    mean_logprob: float | None  # nats; null: it has no tokens
    advantage: float | None  # that the run was last trained with on it; null: it was not, or it is not known


class SampledRequest(msgspec.Struct, frozen=True):
    """Describes a sample request that has ended."""

    id: str
    number: int  # order of acceptance
    group: str  # the same for requests of one prompt to one sampler
    at: float  # when it ended
    weights: str | None  # path of a checkpoint, or name of an ephemeral version; null: the base model
    steps: int | None  # that these weights were trained; null: unknown
    prompt: Excerpt | None  # its end; null: it is not kept
    temperature: float
    samples: list[ShortSample]  # the first ones, in the order that was asked for
    num_samples: int
    error: str | None


class SamplesPage(msgspec.Struct, frozen=True):
    requests: list[SampledRequest]  # in the order that was asked for
    looked_at: int  # requests
    next_start: int | None  # where the next page begins; null: there is none
    kept_hours: float  # for which the server keeps samples


class TokenizedText(msgspec.Struct, frozen=True):
    """Holds a text, token by token."""

    tokens: list[int]
    texts: list[str]
    logprobs: list[float | None] | None  # nats, of each token; null: unknown
    left_out: int  # tokens that are not here
    left_out_at: int  # place in the lists before which these stand


class SampleOfGroup(msgspec.Struct, frozen=True):
    """Holds one answer to the prompt of a group."""

    request_id: str
    place: int  # in its request
    at: float
    stop_reason: StopReason
    mean_logprob: float | None
    advantage: float | None  # as in a list
    content: TokenizedText


class PromptImage(msgspec.Struct, frozen=True):
    """Describes an image of a prompt, which has an address of its own."""

    number: int  # in the prompt, from 0
    tokens: int
    width: int  # pixels, as it was sent
    height: int
    size: int  # bytes


class SampleGroup(msgspec.Struct, frozen=True):
    """Holds the samples of one prompt and one sampler."""

    model: str  # as which OpenAI's routes take the weights; a sampling session has an end
    weights: str | None
    steps: int | None
    prompt: TokenizedText
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int | None
    samples: list[SampleOfGroup]  # in order of acceptance
    left_out: int  # further samples
    not_read: int  # requests that may have the same prompt, and were not read for lack of time
    errors: list[str]  # of requests that failed
    images: list[PromptImage]  # of the prompt
