"""The sample requests of one HTTP call, from their submission to their results: as a stream or at once."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import msgspec

from spmd_tx.coordinator.http.implicit_samplers import ImplicitSampler
from spmd_tx.coordinator.http.openai.detokenize import SampleText
from spmd_tx.coordinator.http.services import Services
from spmd_tx.coordinator.requests.backlog import most_tokens
from spmd_tx.coordinator.requests.records import Failed
from spmd_tx.coordinator.wire import sampling_protobuf
from spmd_tx.coordinator.wire.sampling import SampleRequest
from spmd_tx.coordinator.wire.sampling_protobuf import SampledSequence, TopLogprobs
from spmd_tx.errors import Abandoned, InvalidRequest, Unavailable

WAIT_SECONDS = 3600.0  # for a result, before the next wait
KEEP_ALIVE_SECONDS = 15.0  # between keep-alives, while there is no delta
ENDING = "the server is shutting down; send the request again when it is back"


class PartialSample(Protocol):
    """Shows the known part of a sample: while it is drawn, or from its result."""

    @property
    def tokens(self) -> list[int]: ...

    @property
    def logprobs(self) -> list[float]: ...

    @property
    def top(self) -> TopLogprobs | None: ...

    @property
    def stop_reason(self) -> Literal["stop", "length"] | None: ...


@dataclass(frozen=True)
class Delta:
    """Holds the new part of one choice."""

    index: int
    text: str
    tokens: list[int]
    logprobs: list[float]
    offsets: list[int]  # of each token's text in the choice's text, in characters; empty unless wanted
    finish_reason: Literal["stop", "length"] | None  # None: more follows
    top: TopLogprobs | None = None  # in the place of each token, if wanted


class Choice:
    """Tracks one sample of a call, and how much of it was sent."""

    def __init__(self, index: int, text: SampleText, has_offsets: bool) -> None:
        self.index = index
        self.sent = 0  # tokens
        self._text = text
        self._has_offsets = has_offsets
        self._is_over = False

    def advance(self, sample: PartialSample | None) -> Delta | None:
        """Return the part that is new, if there is one."""
        if sample is None or self._is_over:
            return None
        tokens, logprobs = sample.tokens[self.sent :], sample.logprobs[self.sent :]
        self._is_over = sample.stop_reason is not None
        if not tokens and not self._is_over:
            return None
        top = None if sample.top is None else sample.top[self.sent : self.sent + len(tokens)]
        self.sent += len(tokens)
        text, offsets = self._add(tokens)
        if self._is_over:
            text += self._text.end()
        return Delta(self.index, text, tokens, logprobs, offsets, sample.stop_reason, top)

    def _add(self, tokens: list[int]) -> tuple[str, list[int]]:
        if not self._has_offsets:
            return self._text.add(tokens), []
        text, offsets = "", []
        for token in tokens:
            offsets.append(self._text.length)
            text += self._text.add([token])
        return text, offsets


class SampleStream:
    """Follows accepted sample requests. Its user must close it, which cancels unfinished ones."""

    def __init__(self, services: Services, request_ids: Sequence[str]) -> None:
        self.request_ids = request_ids
        self._services = services
        self._closing = services.health.closing
        self._outcomes = [asyncio.create_task(_outcome(services, each)) for each in request_ids]
        self._stack = ExitStack()
        self._watch = self._stack.enter_context(services.progress.watching(request_ids))
        for each in (self._closing, *self._outcomes):
            each.add_done_callback(self._wake)

    def close(self) -> None:
        """Cancel what is unfinished. Further calls do nothing."""
        self._stack.close()
        self._closing.remove_done_callback(self._wake)
        for request_id, outcome in zip(self.request_ids, self._outcomes, strict=True):
            if not outcome.done():
                outcome.cancel()
                self._services.scheduler.cancel(request_id)
            elif not outcome.cancelled():
                outcome.exception()  # retrieved, since another one may have failed before

    async def results(self, gone: Awaitable[None]) -> list[SampledSequence]:
        """Return all samples, in order. ``gone`` is done when the client has disconnected."""
        leaving = asyncio.ensure_future(gone)
        until_a_failure = asyncio.wait(self._outcomes, return_when=asyncio.FIRST_EXCEPTION)
        everything = asyncio.create_task(until_a_failure)
        try:
            ends = [everything, leaving, self._closing]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not everything.done():
                raise Unavailable(ENDING if self._closing.done() else "the client has hung up")
            for outcome in everything.result()[0]:
                outcome.result()
            return [sequence for outcome in self._outcomes for sequence in outcome.result()]
        finally:
            leaving.cancel()
            everything.cancel()

    async def deltas(self, choices: Sequence[Choice]) -> AsyncIterator[Delta | None]:
        """Yield the deltas of all samples as they come, and None after a while without any."""
        while not all(outcome.done() for outcome in self._outcomes):
            self._watch.changed.clear()
            for delta in self._news(choices):
                yield delta
            if self._closing.done():
                raise Unavailable(ENDING)
            try:
                await asyncio.wait_for(self._watch.changed.wait(), KEEP_ALIVE_SECONDS)
            except TimeoutError:
                yield None
        for delta in self._news(choices):
            yield delta

    def _news(self, choices: Sequence[Choice]) -> list[Delta]:
        per_request = len(choices) // len(self.request_ids)
        known = (self._known(*divmod(place, per_request)) for place in range(len(choices)))
        deltas = [choice.advance(sample) for choice, sample in zip(choices, known, strict=True)]
        return [delta for delta in deltas if delta is not None]

    def _known(self, request: int, index: int) -> PartialSample | None:
        outcome = self._outcomes[request]
        if outcome.done():
            return outcome.result()[index]
        return self._watch.samples.get((self.request_ids[request], index))

    def _wake(self, _: asyncio.Future[Any]) -> None:
        self._watch.changed.set()


async def submit_samples(
    services: Services, sampler: ImplicitSampler, wanted: Sequence[SampleRequest]
) -> SampleStream:
    """Submit sample requests, all or none."""
    accepted = await asyncio.gather(
        *(_submit(services, sampler, sample) for sample in wanted), return_exceptions=True
    )
    request_ids = [each for each in accepted if isinstance(each, str)]
    for error in accepted:
        if isinstance(error, BaseException):
            for request_id in request_ids:
                services.scheduler.cancel(request_id)
            raise error
    return SampleStream(services, request_ids)


async def _submit(services: Services, sampler: ImplicitSampler, wanted: SampleRequest) -> str:
    row, number = sampler.row, next(sampler.numbers)
    sample = msgspec.structs.replace(
        wanted,
        sampling_session_id=row.id,
        seq_id=number,
        model_path=row.model_path,
        base_model=row.base_model if row.model_path is None else None,
    )
    return await services.queue.submit(
        "sample",
        row.id,
        number,
        row.session_id,
        msgspec.json.encode(sample),
        tokens=most_tokens(sample, services.max_context),
    )


async def _outcome(services: Services, request_id: str) -> list[SampledSequence]:
    outcome = None
    while outcome is None:
        outcome = await services.queue.wait(request_id, WAIT_SECONDS)
    if isinstance(outcome, Failed):
        raise InvalidRequest(outcome.error) if outcome.category == "user" else Abandoned(outcome.error)
    return sampling_protobuf.decode_sample_response(outcome.body)
