"""The sample requests of one HTTP call, from their submission to what is new of their samples."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import msgspec
from litestar import Request

from spmd_tx.coordinator.http.implicit_samplers import ImplicitSampler
from spmd_tx.coordinator.http.security.body_room import BodyShare
from spmd_tx.coordinator.http.services import Services, check_running
from spmd_tx.coordinator.http.text_generation.choices import (
    TOKEN_COST,
    ChoiceProgress,
    ChoiceTokens,
    PartialSample,
    echoed,
)
from spmd_tx.coordinator.http.text_generation.kept_turns import Keeping
from spmd_tx.coordinator.requests.backlog import most_tokens
from spmd_tx.coordinator.requests.records import Failed, Finished, Outcome
from spmd_tx.coordinator.wire.sampling import SampleRequest
from spmd_tx.coordinator.wire.sampling_protobuf import SampledSequences
from spmd_tx.errors import Abandoned, InvalidRequest, TooManyRequests, Unavailable

WAIT_SECONDS = 3600.0  # for a result, before the next wait
KEEP_ALIVE_SECONDS = 15.0  # between keep-alives, while there is nothing new
SMALL_BYTES = 64 << 10  # of a result, which needs no room
PIECE_COST = 4096  # of the parts that are written at once: some milliseconds' work
AGAIN_SECONDS = 5.0
Echoes = Sequence[list[int]] | None
ENDING = "the server is shutting down; send the request again when it is back"


class SampleStream:
    """Follows accepted sample requests. Its user must close it, which cancels unfinished ones.

    A result is read when its turn comes, and takes room from then on until the call ends.
    """

    def __init__(
        self,
        services: Services,
        owner: str,
        request_ids: Sequence[str],
        width: int,
        echoes: Echoes = None,
        keeping: Keeping | None = None,
    ) -> None:
        """``width`` is the number of likeliest tokens in the place of each drawn one.

        ``echoes`` are the prompts if they stand before the samples, which are then known when all are drawn.
        """
        self._echoes = echoes
        self._keeping = keeping
        self.request_ids = request_ids
        self._services = services
        self._most_per_part = max(1, PIECE_COST // (TOKEN_COST + width))
        self._closing = services.health.closing
        self._outcomes = [asyncio.create_task(_size(services, each)) for each in request_ids]
        self._owner = owner
        self._place: BodyShare | None = None
        self._read: tuple[int, SampledSequences] | None = None  # the result at work, and its number
        self._cached: dict[int, int] = {}  # tokens of prompts that were cached, by the number of the result
        self._stack = ExitStack()
        self._watch = self._stack.enter_context(services.progress.watching(request_ids))
        for each in (self._closing, *self._outcomes):
            each.add_done_callback(self._wake)

    def close(self) -> None:
        """Cancel what is unfinished. Further calls do nothing."""
        self._stack.close()
        self._closing.remove_done_callback(self._wake)
        if self._place is not None:
            self._services.body_rooms.answers.leave(self._place)
        for request_id, outcome in zip(self.request_ids, self._outcomes, strict=True):
            if not outcome.done():
                outcome.cancel()
                if self._keeping is not None:
                    self._keeping.cut(request_id, self._drawn(request_id))
                self._services.scheduler.cancel(request_id)
            elif not outcome.cancelled():
                outcome.exception()  # retrieved, since another one may have failed before

    def _drawn(self, request_id: str) -> list[PartialSample]:
        """Return what is drawn of each sample of a request."""
        samples = {index: sample for (id, index), sample in self._watch.samples.items() if id == request_id}
        return [samples[index] for index in sorted(samples)]

    async def finished(self, request: Request[Any, Any, Any]) -> None:
        """Wait until all samples are drawn. Raises Unavailable when the client disconnects."""
        leaving = asyncio.create_task(_hung_up(request))
        until_a_failure = asyncio.wait(self._outcomes, return_when=asyncio.FIRST_EXCEPTION)
        everything = asyncio.create_task(until_a_failure)
        try:
            ends = [everything, leaving, self._closing]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if not everything.done():
                raise Unavailable(ENDING if self._closing.done() else "the client has hung up")
            for outcome in everything.result()[0]:
                outcome.result()
        finally:
            leaving.cancel()
            everything.cancel()

    async def news(self, choices: Sequence[ChoiceProgress]) -> AsyncIterator[list[ChoiceTokens] | None]:
        """Yield what is new of all samples in pieces, as it comes, and None after a while without any."""
        is_over = False
        while not is_over:
            self._watch.changed.clear()
            is_over = all(outcome.done() for outcome in self._outcomes)
            async for piece in self.pieces(choices):
                yield piece
            if self._closing.done() and not is_over:
                raise Unavailable(ENDING)
            try:
                if not is_over:
                    await asyncio.wait_for(self._watch.changed.wait(), KEEP_ALIVE_SECONDS)
            except TimeoutError:
                yield None

    async def pieces(self, choices: Sequence[ChoiceProgress]) -> AsyncIterator[list[ChoiceTokens]]:
        """Yield what is new of all samples now, each time as much as is written at once."""
        piece, cost = list[ChoiceTokens](), 0
        per_request = len(choices) // len(self.request_ids)
        for place, choice in enumerate(choices):
            if choice.is_over:
                continue
            sample = await self._current_sample(*divmod(place, per_request))
            while part := choice.take(sample, self._most_per_part):
                piece.append(part)
                cost += part.cost
                if cost >= PIECE_COST:
                    yield piece
                    piece, cost = [], 0
        if piece:
            yield piece

    async def cached_tokens(self) -> int:
        """Return how many tokens of all prompts were cached. All samples must be drawn."""
        for request in range(len(self.request_ids)):
            if request not in self._cached:
                await self._result(request)
        return sum(self._cached.values())

    def cached_so_far(self) -> int:
        """Return how many tokens of the prompts were cached, as far as it is known. Any thread may ask."""
        drawn = {id: sample.job.cache_hits or 0 for (id, _), sample in self._watch.samples.copy().items()}
        known = {self.request_ids[number]: cached for number, cached in self._cached.items()}
        return sum({**drawn, **known}.values())

    async def _current_sample(self, request: int, index: int) -> PartialSample | None:
        request_id = self.request_ids[request]
        if not self._outcomes[request].done():
            return None if self._echoes else self._watch.samples.get((request_id, index))
        if self._read is None or self._read[0] != request:
            self._watch.forget(request_id)
            self._read = None
            self._read = request, await self._result(request)
        result = self._read[1]
        if self._echoes is None:
            return result[index]
        return echoed(self._echoes[request], result.prompt_scores(), result[index])

    async def _result(self, request: int) -> SampledSequences:
        size = self._outcomes[request].result()
        if size > SMALL_BYTES:
            await self._take_room(size)
        body = (await _outcome(self._services, self.request_ids[request])).body
        result = (
            await asyncio.to_thread(SampledSequences, body) if size > SMALL_BYTES else SampledSequences(body)
        )
        if self._keeping is not None and request not in self._cached:
            await self._keeping.keep(self.request_ids[request], result)
        self._cached[request] = result.cache_hits
        return result

    async def _take_room(self, size: int) -> None:
        """Wait for room for a result of this size in place of the one before."""
        room, bounds = self._services.body_rooms.answers, self._services.config.bounds
        if self._place is not None:
            if self._place.held >= size:
                return
            room.leave(self._place)
        self._place = room.place(self._owner, size, lambda: None)
        try:
            async with asyncio.timeout(bounds.body_room_seconds):
                await room.take(self._place, size)
        except TimeoutError:
            raise TooManyRequests(
                f"results of other calls take all of the memory for answers, {room.capacity >> 20} MiB, of "
                "which one owner has half; read answers faster, or ask for fewer at once (the operator "
                "raises the limit answers_bytes)",
                AGAIN_SECONDS,
            ) from None
        room.be_whole(self._place)

    def _wake(self, _: asyncio.Future[Any]) -> None:
        self._watch.changed.set()


async def submit_samples(
    services: Services,
    sampler: ImplicitSampler,
    samples: Sequence[SampleRequest],
    owner: str,
    echoes: Echoes,
    keeping: Keeping | None,
) -> SampleStream:
    """Submit sample requests, all or none. ``echoes`` as in SampleStream."""
    if keeping is not None:
        sampler = replace(sampler, stored_with=keeping.statements)
    accepted = await asyncio.gather(
        *(_submit(services, sampler, sample) for sample in samples), return_exceptions=True
    )
    request_ids = [each for each in accepted if isinstance(each, str)]
    for error in accepted:
        if isinstance(error, BaseException):
            for request_id in request_ids:
                services.scheduler.cancel(request_id)
            raise error
    return SampleStream(services, owner, request_ids, samples[0].topk_sample_logprobs or 0, echoes, keeping)


async def _submit(services: Services, sampler: ImplicitSampler, request: SampleRequest) -> str:
    check_running(services, sampler.base)
    row, number = sampler.row, next(sampler.numbers)
    sample = msgspec.structs.replace(
        request,
        sampling_session_id=row.id,
        seq_id=number,
        model_path=row.model_path,
        base_model=row.base_model if row.model_path is None and row.model_id is None else None,
    )
    return await services.queue.submit(
        "sample",
        row.id,
        number,
        row.session_id,
        msgspec.json.encode(sample),
        base=sampler.base.key,
        also=() if sampler.stored_with is None else await sampler.stored_with(row, number),
        images=sampler.images,
        tokens=most_tokens(sample, sampler.base.model.max_context),
    )


async def _hung_up(request: Request[Any, Any, Any]) -> None:
    """Wait until the client disconnects. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _size(services: Services, request_id: str) -> int:
    """Wait for a result, and return its bytes. The result itself stays in the log until it is needed."""
    return len((await _outcome(services, request_id)).body)


async def _outcome(services: Services, request_id: str) -> Finished:
    outcome: Outcome | None = None
    while outcome is None:
        outcome = await services.queue.wait(request_id, WAIT_SECONDS)
    if isinstance(outcome, Failed):
        raise InvalidRequest(outcome.error) if outcome.category == "user" else Abandoned(outcome.error)
    return outcome
