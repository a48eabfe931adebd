"""Routes that show training runs with their metrics, and that take metrics of clients."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from typing import TypeVar

from litestar import Controller, get, post
from litestar.params import FromPath, FromQuery, JSONBody
from litestar.response import ServerSentEvent, ServerSentEventMessage
from litestar.status_codes import HTTP_200_OK
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from spmd_tx.coordinator.catalog.listings import Page, Which
from spmd_tx.coordinator.http.access import Access
from spmd_tx.coordinator.http.authentication import UNMETERED
from spmd_tx.coordinator.http.services import Accessible, Service, Services
from spmd_tx.coordinator.requests import rows, run_metrics
from spmd_tx.coordinator.storage.tables import Model, Session
from spmd_tx.coordinator.wire.fields import StatusResponse
from spmd_tx.coordinator.wire.runs import (
    MOST_METRICS,
    LogMetricsRequest,
    MetricsPoint,
    MetricsResponse,
    Run,
    RunsResponse,
)
from spmd_tx.errors import Forbidden, InvalidRequest

T = TypeVar("T")

METRICS = "/api/v1/training_runs/{run_id:str}/metrics"
MOST_POINTS = 5000
NEWS_SECONDS = 1.0  # between two looks for changes
KEY_SECONDS = 0.25  # between two looks whether the key is valid
ALIVE_SECONDS = 15.0  # between two signs of life


class RunsController(Controller):
    path = "/console/api/runs"

    @get("/", opt=UNMETERED)
    async def runs(
        self, services: Service, access: Accessible, limit: FromQuery[int] = 50, cursor: FromQuery[int] = 0
    ) -> RunsResponse:
        """List the runs that the caller may see, newest first."""
        offset, limit = Page(cursor, min(limit, 100)).clamped()
        query = (
            select(Model, Session)
            .join(Session, Session.id == Model.session_id)
            .where(Which().of(access.caller))
            .order_by(Model.created_at.desc(), Model.id)
        )

        async def answer() -> RunsResponse:
            async with services.database.reading() as db:
                found = (await db.execute(query.offset(offset).limit(limit + 1))).all()
                shown = [await _run(db, model, session) for model, session in found[:limit]]
            return RunsResponse(shown, offset + limit if len(found) > limit else None)

        whose = access.caller.owner, access.caller.role
        return await _shared(services, ("runs", *whose, offset, limit), answer)

    @get("/{run_id:str}", opt=UNMETERED)
    async def run(self, run_id: FromPath[str], services: Service, access: Accessible) -> Run:
        model = await access.model(run_id)

        async def answer() -> Run:
            async with services.database.reading() as db:
                session = await db.get_one(Session, model.session_id)
                return await _run(db, model, session)

        return await _shared(services, ("run", model.id), answer)


class RunMetricsController(Controller):
    @get(["/console/api/runs/{run_id:str}/metrics", METRICS], opt=UNMETERED)
    async def metrics(
        self,
        run_id: FromPath[str],
        services: Service,
        access: Accessible,
        after: FromQuery[int] = -1,
        limit: FromQuery[int] = MOST_POINTS,
    ) -> MetricsResponse:
        """Return the steps behind the one with the number ``after``."""
        model = await access.model(run_id)
        after, limit = max(after, -1), min(max(limit, 1), MOST_POINTS)

        async def answer() -> MetricsResponse:
            async with services.database.reading() as db:
                found, following = await run_metrics.points(db, model.id, after, limit)
            return MetricsResponse([MetricsPoint(*each) for each in found], following)

        return await _shared(services, ("metrics", model.id, after, limit), answer)

    @post(METRICS, status_code=HTTP_200_OK)
    async def log(
        self,
        run_id: FromPath[str],
        data: JSONBody[LogMetricsRequest],
        services: Service,
        access: Accessible,
    ) -> StatusResponse:
        """Keep what a client knows of a step beside the server's own metrics of it."""
        if not 0 < len(data.metrics) <= MOST_METRICS:
            raise InvalidRequest(f"metrics has {len(data.metrics)} entries; send 1 to {MOST_METRICS}")
        if data.step is not None and not 0 <= data.step < 2**53:
            raise InvalidRequest(f"step is {data.step}; steps count from 0")
        model = await access.model(run_id)
        async with services.database.transaction() as db:
            newest = await rows.highest_number(db, model.id)
            run_metrics.add_of_client(db, model.id, newest, data.step, data.metrics)
        return StatusResponse("success")


class StreamController(Controller):
    path = "/console/api/stream"

    @get("/", opt=UNMETERED)
    async def stream(self, services: Service, access: Accessible) -> ServerSentEvent:
        """Send the ids of runs that have new metrics, at most once a second."""
        return ServerSentEvent(_changes(services, access))


async def _changes(services: Services, access: Access) -> AsyncIterator[ServerSentEventMessage]:
    async with services.database.reading() as db:
        number = await run_metrics.newest_number(db)
    quiet = waited = 0.0
    while not services.health.closing.done():
        pause = min(KEY_SECONDS, NEWS_SECONDS)
        await asyncio.wait([services.health.closing], timeout=pause)
        quiet, waited = quiet + pause, waited + pause
        try:
            services.keyring.vouch(access.caller)
        except Forbidden:  # the key was revoked
            return
        if waited < NEWS_SECONDS:
            continue
        waited = 0.0
        async with services.database.reading() as db:
            changed, number = await run_metrics.changed_since(db, number)
            seen = await _seen(db, list(changed), access)
        if seen:
            quiet = 0.0
            steps = {run: changed[run] for run in seen if changed[run] is not None}
            yield ServerSentEventMessage(event="changed", data=json.dumps({"runs": seen, "steps": steps}))
        elif quiet >= ALIVE_SECONDS:
            quiet = 0.0
            yield ServerSentEventMessage(comment="alive")


async def _shared(services: Services, what: tuple[Hashable, ...], answer: Callable[[], Awaitable[T]]) -> T:
    """Answer once for all consoles that ask for the same before there are new metrics."""
    async with services.database.reading() as db:
        newest = await run_metrics.newest_number(db)
    return await services.shared_answers.get((*what, newest), answer)


async def _seen(db: AsyncSession, runs: list[str], access: Access) -> list[str]:
    if not runs:
        return []
    joined = select(Model.id).join(Session, Session.id == Model.session_id)
    return list(await db.scalars(joined.where(Model.id.in_(runs), Which().of(access.caller))))


async def _run(db: AsyncSession, model: Model, session: Session) -> Run:
    summary = await run_metrics.summary(db, model.id)
    return Run(
        id=model.id,
        session_id=model.session_id,
        base_model=model.base_model,
        rank=model.rank,
        owner=session.owner,
        created_at=model.created_at,
        is_open=session.ended_at is None,
        metadata=model.user_metadata or session.user_metadata,
        steps=summary.steps,
        last_at=summary.last_at,
        last=summary.last,
    )
