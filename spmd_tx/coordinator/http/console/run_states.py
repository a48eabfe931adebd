"""Gathers from memory how the runs of one answer are."""

from collections import defaultdict
from collections.abc import Sequence

import msgspec
from sqlalchemy.ext.asyncio import AsyncSession

from spmd_tx.coordinator.bases.health import trainer_first
from spmd_tx.coordinator.http.services import Services
from spmd_tx.coordinator.requests.runs import run_health, run_metrics
from spmd_tx.coordinator.requests.runs.recent import KEPT_SECONDS, Timed
from spmd_tx.coordinator.requests.runs.run_health import OpenRun
from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.storage.tables import ModelRow, SessionRow
from spmd_tx.coordinator.wire.console.runs import RunFailure, RunHealth

MOST_REASONS = 10  # of an answer, since finding out why a request waits takes a while
TRAINING_RUN = ":train:"  # in the ids of models, and not in those of samplers


class RunStates:
    """Knows the requests of the last minutes by session."""

    def __init__(self, services: Services) -> None:
        self._services, self._now, self._reasons = services, clock.now(), 0
        self._unfinished = defaultdict[str, list[Timed]](list)
        self._ended = defaultdict[str, list[Timed]](list)
        for timed in services.queue.at_work():
            self._unfinished[timed.request.session_id].append(timed)
        for timed in services.queue.recent.ended_since(self._now - KEPT_SECONDS):
            self._ended[timed.request.session_id].append(timed)

    async def health(
        self, db: AsyncSession, runs: Sequence[tuple[ModelRow, SessionRow]]
    ) -> dict[str, RunHealth]:
        """Say how runs are, by their IDs."""
        found = {model.id: self._in_memory(model, session) for model, session in runs}
        gone = [model.id for model, session in runs if self._has_gone(model, session, found[model.id])]
        for line in await run_metrics.saved(db, gone):
            found[line] = run_health.without_loss(found[line])
        return found

    def _in_memory(self, model: ModelRow, session: SessionRow) -> RunHealth:
        """Say how a run is, as far as its checkpoints do not matter."""
        ended = _of_run(self._ended[session.id], model)
        if session.ended_at is None:
            health = self._of_open(model, session, ended)
        else:
            ending = session.finish_reason, session.finish_detail, session.ended_because
            health = run_health.of_ended(*ending)
        return msgspec.structs.replace(health, last_failure=_last_failure(ended))

    def _has_gone(self, model: ModelRow, session: SessionRow, health: RunHealth) -> bool:
        """Return whether a run's client has gone without a word, and not in the middle of a request."""
        is_at_rest = not _of_run(self._unfinished[session.id], model)
        return session.finish_reason is None and health.state in ("silent", "interrupted") and is_at_rest

    def _of_open(self, model: ModelRow, session: SessionRow, ended: list[Timed]) -> RunHealth:
        unfinished = _of_run(self._unfinished[session.id], model)
        last = max((timed.finished_at or 0.0 for timed in ended), default=model.created_at)
        is_waiting = all(timed.times.sent_at is None for timed in unfinished)
        return run_health.of_open(
            OpenRun(
                unheard=self._services.catalog.unheard_seconds(session.id),
                idle=self._now - last,
                workers=self._workers(model),
                is_waiting=is_waiting,
                has_requests=bool(unfinished),
                reason=self._reason(unfinished[0]) if unfinished and is_waiting else None,
                failed=sum(timed.failed is not None for timed in ended),
            )
        )

    def _workers(self, model: ModelRow) -> str | None:
        """Say what the workers of a run's base model do instead of running commands."""
        base = self._services.bases.key_of_row(model.base_model)
        groups = trainer_first(self._services.health.groups, base)
        if not groups:
            return "its base model is not served now"
        return None if any(group.state == "ready" for group in groups) else groups[0].phase

    def _reason(self, timed: Timed) -> str | None:
        self._reasons += 1
        if self._reasons > MOST_REASONS:
            return None
        return self._services.scheduler.status(timed.request.id).reason


def _last_failure(ended: list[Timed]) -> RunFailure | None:
    """Return the newest one of requests that have ended, oldest first."""
    for request, _, finished_at, _, failed in reversed(ended):
        if failed is not None and finished_at is not None:
            return RunFailure(request.id, request.kind, failed.category, failed.error, finished_at)
    return None


def _of_run(requests: list[Timed], model: ModelRow) -> list[Timed]:
    """Leave out those of other models of the run's session. Samplers do not say whose they are."""
    return [
        timed
        for timed in requests
        if timed.request.line == model.id or TRAINING_RUN not in timed.request.line
    ]
