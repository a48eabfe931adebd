"""Routes that show training runs with their metrics, and that take metrics of clients."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator

from litestar import Controller, get, post
from litestar.params import FromPath, FromQuery, JSONBody
from litestar.response import ServerSentEvent, ServerSentEventMessage
from litestar.status_codes import HTTP_200_OK
from sqlalchemy import select, true
from sqlalchemy.ext.asyncio import AsyncSession

from spmd_tx.coordinator.catalog.listings import MAX_OFFSET, Page, Which
from spmd_tx.coordinator.http.authentication import UNMETERED
from spmd_tx.coordinator.http.security.access import Access
from spmd_tx.coordinator.http.services import Accessible, Service, Services
from spmd_tx.coordinator.requests import rows
from spmd_tx.coordinator.requests.runs import run_metrics
from spmd_tx.coordinator.storage.tables import Model, Session
from spmd_tx.coordinator.wire.console.runs import (
    MOST_METRICS,
    LogMetricsRequest,
    MetricsPoint,
    MetricsResponse,
    Run,
    RunsResponse,
)
from spmd_tx.coordinator.wire.fields import StatusResponse
from spmd_tx.errors import Forbidden, InvalidRequest, NotFound

METRICS = "/api/v1/training_runs/{run_id:str}/metrics"
MOST_POINTS = 5000
BEGINNING = re.compile(r"[0-9A-Za-z:-]{0,200}")  # of a run's ID
KEY_SECONDS = 0.25  # between two looks whether the key is valid
ALIVE_SECONDS = 15.0  # between two signs of life


class RunsController(Controller):
    path = "/console/api/runs"

    @get("/", opt=UNMETERED)
    async def runs(
        self,
        services: Service,
        access: Accessible,
        limit: FromQuery[int] = 50,
        cursor: FromQuery[int] = 0,
        beginning: FromQuery[str] = "",
    ) -> RunsResponse:
        """List the runs that the caller may see, newest first; perhaps only those whose IDs begin so."""
        if BEGINNING.fullmatch(beginning) is None:
            raise InvalidRequest(f"beginning is {beginning[:100]!r}; give the beginning of a run's ID")
        offset, limit = Page(cursor, min(limit, 100)).clamped()
        query = (
            select(Model, Session)
            .join(Session, Session.id == Model.session_id)
            .where(Which().of(access.caller), Model.id.startswith(beginning) if beginning else true())
            .order_by(Model.created_at.desc(), Model.id)
        )

        async def answer() -> RunsResponse:
            async with services.database.reading() as db:
                found = (await db.execute(query.offset(offset).limit(limit + 1))).all()
                shown = [await _run(services, db, model, session) for model, session in found[:limit]]
            return RunsResponse(shown, offset + limit if len(found) > limit else None)

        whose = access.caller.owner, access.caller.role
        news = services.queue.news.told
        return await services.shared_answers.get(("runs", *whose, offset, limit, beginning, news), answer)

    @get("/{run_id:str}", opt=UNMETERED)
    async def run(self, run_id: FromPath[str], services: Service, access: Accessible) -> Run:
        """Return a run, with what its client has said of it."""
        model = await access.model(run_id)

        async def answer() -> Run:
            async with services.database.reading() as db:
                session = await db.get_one(Session, model.session_id)
                return await _run(services, db, model, session)

        key = "run", model.id, services.queue.news.told
        return await services.shared_answers.get(key, answer)

    @get("/{run_id:str}/metrics", opt=UNMETERED)
    async def metrics(
        self,
        run_id: FromPath[str],
        services: Service,
        access: Accessible,
        after: FromQuery[int] = -1,
        limit: FromQuery[int] = MOST_POINTS,
    ) -> MetricsResponse:
        """Return the steps behind the one with the number ``after``, as of the last news or later."""
        key = "metrics", (await access.model(run_id)).id, after, limit, services.queue.news.told
        return await services.shared_answers.get(key, lambda: _points(services, access, run_id, after, limit))


class RunMetricsController(Controller):
    @get(METRICS, opt=UNMETERED)
    async def metrics(
        self,
        run_id: FromPath[str],
        services: Service,
        access: Accessible,
        after: FromQuery[int] = -1,
        limit: FromQuery[int] = MOST_POINTS,
    ) -> MetricsResponse:
        """Return the steps behind the one with the number ``after``."""
        return await _points(services, access, run_id, after, limit)

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
        services.queue.news.add(model.id, data.step)
        return StatusResponse("success")


class StreamController(Controller):
    path = "/console/api/stream"

    @get("/", opt=UNMETERED)
    async def stream(self, services: Service, access: Accessible) -> ServerSentEvent:
        """Send the ids of runs that have new metrics, at most every two seconds."""
        return ServerSentEvent(_changes(services, access))


async def _points(services: Services, access: Access, run_id: str, after: int, limit: int) -> MetricsResponse:
    model = await access.model(run_id)
    start, most = min(max(after, -1), MAX_OFFSET), min(max(limit, 1), MOST_POINTS)
    async with services.database.reading() as db:
        found, following = await run_metrics.points(db, model.id, start, most)
    return MetricsResponse([MetricsPoint(*each) for each in found], following)


async def _changes(services: Services, access: Access) -> AsyncIterator[ServerSentEventMessage]:
    news, seen = services.queue.news, dict[str, bool]()
    number, spoke_at = news.told, time.monotonic()
    while not services.health.closing.done():
        await asyncio.wait([services.health.closing], timeout=min(KEY_SECONDS, news.seconds_left()))
        try:
            services.keyring.vouch(access.caller)
        except Forbidden:  # the key was revoked
            return
        changed = news.since(number)
        if changed is None:  # a slow reader: the page asks for everything when it connects again
            return
        number = news.told
        for run in changed.keys() - seen.keys():
            seen[run] = await _sees(access, run)
        shown = [run for run in changed if seen[run]]
        if shown:
            steps = {run: changed[run] for run in shown if changed[run] is not None}
            yield ServerSentEventMessage(event="changed", data=json.dumps({"runs": shown, "steps": steps}))
        elif time.monotonic() < spoke_at + ALIVE_SECONDS:
            continue
        else:
            yield ServerSentEventMessage(comment="alive")
        spoke_at = time.monotonic()


async def _sees(access: Access, run: str) -> bool:
    try:
        await access.model(run)
    except NotFound:
        return False
    return True


async def _run(services: Services, db: AsyncSession, model: Model, session: Session) -> Run:
    summary = await run_metrics.summary(db, model.id)
    return Run(
        id=model.id,
        session_id=model.session_id,
        base_model=model.base_model,
        rank=model.rank,
        owner=session.owner,
        created_at=model.created_at,
        is_open=session.ended_at is None,
        silent_seconds=services.catalog.silent_seconds(session.id),
        metadata=model.user_metadata or session.user_metadata,
        display_name=session.display_name,
        steps=summary.steps,
        last_at=summary.last_at,
        last=summary.last,
    )
