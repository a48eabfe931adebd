"""Runs requests whose outcome is known again, for their effect; a stored result never changes."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from spmd_tx.coordinator.requests.failures import failure
from spmd_tx.coordinator.requests.queue import RequestQueue
from spmd_tx.coordinator.requests.records import Request
from spmd_tx.coordinator.runtime import metrics
from spmd_tx.coordinator.runtime.containment import report
from spmd_tx.coordinator.training.execute import WITHOUT_EFFECT, Training
from spmd_tx.coordinator.training.line import ModelLine
from spmd_tx.coordinator.training.outcomes import Begun
from spmd_tx.errors import DamagedBody, MeshError, NotSent, RequestError

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class WorkOn(Protocol):
    """Does a part of a request, again after each outage. Raises MeshError when the workers are lost."""

    async def __call__(self, request: Request, work: Callable[[], Awaitable[Result]], /) -> Result: ...


@dataclass(frozen=True)
class Replay:
    """Runs requests of a model again, one after the other, and compares their outcomes."""

    log: RequestQueue
    training: Training
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    work_on: WorkOn
    forget: Callable[[str], None]  # is told the id of each request that has run again

    async def run_again(self, entry: ModelLine, request: Request) -> None:
        """Begin a request; its outcome is compared later. A request without effect is passed over."""
        if request.kind in WITHOUT_EFFECT:
            self._done(entry, request)
            return
        known = entry.again[request.id]
        try:
            async with self.training.turn(request.kind):
                body = await self.work_on(request, lambda: self.log.payload(request))
                begin = partial(self.training.begin_again, entry.model, request, body, known.layout)
                begun = await self.work_on(request, begin)
        except MeshError:
            return
        except (RequestError, DamagedBody, OSError, NotSent) as error:
            _refuse(entry, request, error)
            return
        except BaseException as error:
            text = report(error, f"running {request} again")
            if entry.model.refusal is None:
                entry.refuse(f"{entry.model.id} cannot be restored: {text}")
            return
        entry.begun(request)
        if begun is None:
            self._done(entry, request)
            return
        comparing = self.spawn(self._compare(entry, request, begun, known.digest))
        if begun.next_waits:
            await comparing

    async def _compare(self, entry: ModelLine, request: Request, begun: Begun, digest: str | None) -> None:
        try:
            outcome = await self.work_on(request, begun.outcome)
        except MeshError:
            return
        except NotSent as error:
            _refuse(entry, request, error)
            return
        except BaseException as error:  # its commands count; of some requests that is known already
            outcome = failure(error, f"the result of {request}, again,")
        metrics.REPLAYED_REQUESTS.labels(metrics.group()).inc()
        if digest is not None and outcome.digest != digest:
            metrics.REPLAY_DIGEST_MISMATCHES.labels(metrics.group()).inc()
            logger.error(
                "%s, run again, did not give the same result; the stored one stays. Is this the "
                "same kind of device, and the same mesh, as before?",
                request,
            )
        self._done(entry, request)

    def _done(self, entry: ModelLine, request: Request) -> None:
        self.forget(request.id)
        entry.ran_again(request)


def _refuse(entry: ModelLine, request: Request, error: Exception) -> None:
    if entry.to_run_again:
        why = f"{entry.model.id} cannot be restored: request {request.seq_id} cannot be run again: {error}"
        logger.error("%s", why)
        entry.refuse(entry.model.refusal or why)
