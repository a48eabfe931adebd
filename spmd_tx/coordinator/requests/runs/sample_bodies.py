"""Reads what sample requests asked and what they got, and searches it for a text. Blocks; knows no SQL."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from spmd_tx.coordinator.requests.payload_files import read_body
from spmd_tx.coordinator.requests.records import BodyRef
from spmd_tx.coordinator.wire import sampling_protobuf
from spmd_tx.coordinator.wire.sampling import ImageRef, SampleRequest, SamplingParams
from spmd_tx.coordinator.wire.sampling_protobuf import SampledSequence
from spmd_tx.errors import DamagedBody

MOST_BYTES = 16 << 20  # of a body on disk, beyond which it is not read
MOST_SEARCHED = 1 << 20  # tokens, in a search

DecodeTexts = Callable[[Sequence[Sequence[int]]], Sequence[str]]  # tokens into texts


class StoredSample(NamedTuple):
    """Says where the bodies of a request are."""

    line: str  # id of its sampler
    payload: BodyRef
    result: BodyRef | None  # None: there is none

    @property
    def largest(self) -> int:
        """The bytes of the larger body, as they are stored."""
        bodies = [each for each in (self.payload, self.result) if each is not None]
        return max(len(each) if isinstance(each, bytes) else each.length for each in bodies)


class ShownSize(NamedTuple):
    """Says how much of a request is kept in memory: tokens of the beginning and of the end, and samples."""

    prompt: tuple[int, int]
    sample: tuple[int, int]
    samples: int


@dataclass(frozen=True)
class Part:
    """Holds tokens, without the middle where there are too many."""

    tokens: list[int]
    logprobs: list[float] | None  # nats, of each of these tokens
    left_out: int  # tokens that are not here
    left_out_at: int  # place before which these stand

    @property
    def length(self) -> int:
        """The tokens of the whole."""
        return len(self.tokens) + self.left_out


NOTHING = Part([], None, 0, 0)


@dataclass(frozen=True)
class SampleAnswer:
    """Holds one sample."""

    content: Part
    stop_reason: Literal["stop", "length"]
    mean_logprob: float | None  # nats, of the whole; None: it has no tokens


@dataclass(frozen=True)
class SampleBody:
    """Holds what a request asked and what it got."""

    group: str  # the same for requests of one prompt to one sampler
    digest: str  # of the prompt
    prompt: Part
    params: SamplingParams
    answers: list[SampleAnswer]  # the first ones
    num_answers: int
    images: list[ImageRef] = field(default_factory=list)  # of the prompt

    @property
    def only_scores(self) -> bool:
        """Whether the prompt was scored and nothing was drawn."""
        return self.params.max_tokens == 0


def read(payloads: Path, stored: StoredSample, size: ShownSize) -> SampleBody | None:
    """Read the bodies of a request; None: they are not kept, or too large to show. Blocks.

    A failed request has no answers.
    """
    if stored.largest > MOST_BYTES:
        return None
    try:
        asked = msgspec.json.decode(read_body(payloads, stored.payload), type=SampleRequest)
        got = b"" if stored.result is None else read_body(payloads, stored.result)
    except DamagedBody:
        return None
    prompt = asked.prompt.token_ids
    digest = blake2b(np.asarray(prompt, np.int32).tobytes(), digest_size=8)
    of_prompt = digest.hexdigest()
    digest.update(stored.line.encode())
    samples = sampling_protobuf.decode_sample_response(got)
    return SampleBody(
        digest.hexdigest(),
        of_prompt,
        _part(prompt, None, size.prompt),
        asked.sampling_params,
        [_answer(sample, size.sample) for sample in samples[: size.samples]],
        len(samples),
        [chunk.stored for chunk in asked.prompt.chunks if chunk.stored is not None],
    )


class WantedSamples(NamedTuple):
    """Says what a search looks for."""

    text: str = ""  # in prompts and answers, in any case of its letters; empty: any
    digest: str | None = None  # of the prompt; None: any


class Searched(NamedTuple):
    """Says what a search has found."""

    places: list[int]  # among the requests that it was given
    looked_at: int


def read_some(
    payloads: Path, stored: Iterable[StoredSample], size: ShownSize, seconds: float
) -> list[SampleBody | None]:
    """Read the first of these requests, one at least, for some seconds."""
    end, bodies = time.monotonic() + seconds, list[SampleBody | None]()
    for each in stored:
        bodies.append(read(payloads, each, size))
        if time.monotonic() > end:
            break
    return bodies


def read_alike(
    payloads: Path, stored: Sequence[StoredSample], size: ShownSize, seconds: float
) -> list[SampleBody | None]:
    """Read as ``read_some`` does, but leave out what is not of the first one's group (None).

    All together have as many answers as one may have, and the first one has the prompt.
    """
    end, bodies, left = time.monotonic() + seconds, list[SampleBody | None](), size.samples
    for each in stored:
        body, first = read(payloads, each, size), bodies[0] if bodies else None
        if body is not None and first is not None:
            body = replace(body, prompt=NOTHING) if body.group == first.group else None
        if body is not None:
            body = replace(body, answers=body.answers[:left])
            left -= len(body.answers)
        bodies.append(body)
        if bodies[0] is None or time.monotonic() > end:
            break
    return bodies


@dataclass(frozen=True)
class Search:
    """Looks for samples."""

    wanted: WantedSamples
    most: int  # requests to be found
    size: ShownSize  # of what is looked at
    seconds: float  # after which it ends

    def run(self, payloads: Path, stored: Sequence[StoredSample], decode: DecodeTexts) -> Searched:
        """Look at the first of these requests, one at least."""
        end, places, searched, looked_at = time.monotonic() + self.seconds, list[int](), 0, 0
        for place, each in enumerate(stored):
            if len(places) == self.most or searched > MOST_SEARCHED:
                break
            if looked_at and time.monotonic() > end:
                break
            looked_at += 1
            body = read(payloads, each, self.size)
            if body is None or self.wanted.digest not in (None, body.digest):
                continue
            if self.wanted.text:
                tokens = [body.prompt.tokens, *(answer.content.tokens for answer in body.answers)]
                searched += sum(map(len, tokens))
                if not any(self.wanted.text.lower() in text.lower() for text in decode(tokens)):
                    continue
            places.append(place)
        return Searched(places, looked_at)


def _answer(sample: SampledSequence, ends: tuple[int, int]) -> SampleAnswer:
    mean = float(np.mean(sample.logprobs)) if sample.logprobs else None
    return SampleAnswer(_part(sample.tokens, sample.logprobs, ends), sample.stop_reason, mean)


def _part(tokens: Sequence[int], logprobs: Sequence[float] | None, ends: tuple[int, int]) -> Part:
    first, last = ends
    left_out = max(0, len(tokens) - first - last)
    behind = slice(first + left_out, None)
    return Part(
        [*tokens[:first], *tokens[behind]],
        None if logprobs is None else [*logprobs[:first], *logprobs[behind]],
        left_out,
        min(first, len(tokens)),
    )
