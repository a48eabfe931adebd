"""Admits samples to the batch: all that wait, but suspects first, each alone on the device."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

from spmd_tx.coordinator.grammar.compiler import CompiledGrammar
from spmd_tx.coordinator.images.seen import SeenImages
from spmd_tx.coordinator.requests.queue import RequestQueue
from spmd_tx.coordinator.requests.records import Request, read_body
from spmd_tx.coordinator.runtime.owner_turns import OWNER
from spmd_tx.coordinator.sampling.bank import VersionKey
from spmd_tx.coordinator.scheduler.generation import GenerationParts
from spmd_tx.coordinator.scheduler.request_table import Danger, RequestState, RequestStatus, RequestTable
from spmd_tx.coordinator.scheduler.tasks import Tasks
from spmd_tx.coordinator.storage.tables import SamplerRow
from spmd_tx.coordinator.wire.sampling import SampleRequest

Result = TypeVar("Result")


class NewSample(NamedTuple):
    """Holds a sample that has not begun."""

    body: SampleRequest
    grammar: CompiledGrammar | None  # if it has one
    images: SeenImages | None  # None: the model takes text alone


class Attempt(Protocol):
    """Does a part of a request; None when the request has failed because of it, or the workers are lost."""

    async def __call__(self, request: Request, work: Callable[[], Awaitable[Result]], /) -> Result | None: ...


@dataclass
class SampleGate:
    """Admits the samples of one generation of workers."""

    log: RequestQueue
    parts: GenerationParts
    table: RequestTable
    restored: Callable[[SamplerRow], Awaitable[None]]  # returns when a sampler's model is what it was
    attempt: Attempt
    tasks: Tasks
    wake: Callable[[], None]
    _held: list[RequestState] = field(default_factory=list)  # until suspects were seen to do no harm

    def arrive(self, request: Request) -> None:
        state = self.table.find_unfinished(request.id)
        if state is not None:
            self._held.append(state)

    def admit_those_who_may(self) -> None:
        if not self._held:
            return
        is_one_alone = any(
            each.status is RequestStatus.BEGUN and each.request.kind == "sample"
            for each in self.table.in_danger_of(Danger.WORKERS)
        )
        if is_one_alone:
            return
        held = [state for state in self._held if state.status is not RequestStatus.ENDED]
        first_suspect = next((state for state in held if state.is_suspect), None)
        if first_suspect is None:
            self._held = []
            for state in held:
                self._begin(state)
        elif not self.parts.sampling.waiting():
            self._held.remove(first_suspect)
            self._begin(first_suspect)

    def _begin(self, state: RequestState) -> None:
        state.status = RequestStatus.BEGUN
        self.tasks.spawn(self._admit(state))

    async def _admit(self, state: RequestState) -> None:
        request, versions = state.request, self.parts.versions
        OWNER.set(request.session_id)
        new = await self.attempt(request, partial(self._read, request)) if state.job is None else None
        version = await self.attempt(request, lambda: versions.of(request.line, self.restored))
        if state.status is RequestStatus.ENDED or version is None or (new is None and state.job is None):
            return
        self.log.note("began", [request.id])
        await self.attempt(request, partial(self._join, state, version, new))
        self.wake()

    async def _read(self, request: Request) -> NewSample:
        """Read a sample that has not begun, decode its images, and compile its grammar."""
        sample = read_body(await self.log.payload(request), SampleRequest)
        images, seen, grammar = self.parts.training.images, None, None
        if images is not None:
            seen = await images.take(request.session_id, sample.prompt.images, for_training=False)
        if sample.grammar is not None:
            assert self.parts.grammars is not None, "a request with a grammar came to parts that know none"
            grammar = await self.parts.grammars.compile(sample.grammar)
        return NewSample(sample, grammar, seen)

    async def _join(self, state: RequestState, version: VersionKey, new: NewSample | None) -> None:
        request_id, sampling = state.request.id, self.parts.sampling
        if state.status is RequestStatus.ENDED:
            return
        job, state.job = state.job, None
        try:
            if job is None:
                assert new is not None
                sampling.admit(request_id, new.body, version, new.grammar, new.images)
            else:
                job.version = version  # newer, if its sampler is one of kind inflight
                sampling.resume(job)
        except BaseException:
            sampling.cancel(request_id)  # should it be half in
            raise
