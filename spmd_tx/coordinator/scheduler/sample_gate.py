"""Admits samples to the batch: all that wait, but suspects first, each alone on the device."""

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

from spmd_tx.coordinator.requests.queue import RequestQueue
from spmd_tx.coordinator.requests.records import Request, read_body
from spmd_tx.coordinator.sampling.bank import VersionKey
from spmd_tx.coordinator.sampling.batch import SampleBatch
from spmd_tx.coordinator.sampling.job import SampleJob
from spmd_tx.coordinator.sampling.versions import Versions
from spmd_tx.coordinator.scheduler.unfinished import Unfinished
from spmd_tx.coordinator.wire.sampling import SampleRequest

Result = TypeVar("Result")


class Attempt(Protocol):
    """Does a part of a request; None when the request has failed because of it, or the workers are lost."""

    async def __call__(self, request: Request, work: Callable[[], Awaitable[Result]], /) -> Result | None: ...


@dataclass
class SampleGate:
    """Admits the samples of one generation of workers."""

    log: RequestQueue
    versions: Versions
    sampling: SampleBatch
    unfinished: Unfinished
    suspects: set[str]
    jobs: dict[str, SampleJob]  # of the last generation, to go on with
    restored: Callable[[str], Awaitable[None]]  # returns when a model is what it was
    attempt: Attempt
    spawn: Callable[[Coroutine[Any, Any, None]], object]
    wake: Callable[[], None]
    _held: list[Request] = field(default_factory=list)  # until those before them were seen to do no harm
    _alone: str | None = None  # the suspect that is on the device

    def arrive(self, request: Request) -> None:
        self._held.append(request)

    def ended(self, request: Request) -> None:
        """Note that a request has its outcome."""
        if self._alone == request.id:
            self._alone = None
            self.wake()

    def admit_those_who_may(self) -> None:
        if self._alone is not None:
            return
        suspects = [request for request in self._held if request.id in self.suspects]
        if not suspects:
            held, self._held = self._held, []
            for request in held:
                self.spawn(self._admit(request))
        elif not self.sampling.waiting():
            self._alone = suspects[0].id
            self._held.remove(suspects[0])
            self.spawn(self._admit(suspects[0]))

    async def _admit(self, request: Request) -> None:
        body = await self.attempt(request, lambda: self.log.payload(request))
        version = await self.attempt(request, lambda: self.versions.of(request.line, self.restored))
        if request.id not in self.unfinished or body is None or version is None:
            return
        self.log.note("began", [request.id])
        await self.attempt(request, partial(self._join, request, body, version))
        self.wake()

    async def _join(self, request: Request, body: bytes, version: VersionKey) -> None:
        job = self.jobs.pop(request.id, None)
        try:
            if job is None:
                self.sampling.admit(request.id, read_body(body, SampleRequest), version)
            else:
                job.version = version  # newer, if its sampler is one of kind inflight
                self.sampling.resume(job)
        except BaseException:
            self.sampling.cancel(request.id)  # should it be half in
            raise
