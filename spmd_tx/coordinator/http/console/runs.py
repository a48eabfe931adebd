"""Routes that show training runs with their metrics, and that take metrics of clients."""

import gzip
import math
import re
import time
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import NamedTuple, cast

import msgspec
from litestar import Controller, MediaType, Request, Response, get, patch, post
from litestar.di import NamedDependency, Provide
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import FromPath, FromQuery, JSONBody
from litestar.response import Stream
from litestar.status_codes import HTTP_200_OK
from sqlalchemy import Row, select
from sqlalchemy.ext.asyncio import AsyncSession

from spmd_tx.coordinator.catalog.listings import MAX_OFFSET, ROWS_AT_ONCE, ListingPage, SessionFilter
from spmd_tx.coordinator.http.answer_guard import polled, take_turn
from spmd_tx.coordinator.http.authentication import UNMETERED
from spmd_tx.coordinator.http.console.run_states import RunStates
from spmd_tx.coordinator.http.services import ApiCall, Services
from spmd_tx.coordinator.requests import rows
from spmd_tx.coordinator.requests.runs import metric_pages, run_metrics
from spmd_tx.coordinator.requests.runs.curve_columns import CurveAxis, CurveWindow
from spmd_tx.coordinator.requests.runs.run_listing import SEARCH_CHARACTERS, RunQuery
from spmd_tx.coordinator.runtime.threads import compute
from spmd_tx.coordinator.storage.row_pieces import in_pieces
from spmd_tx.coordinator.storage.tables import ModelRow, SessionRow
from spmd_tx.coordinator.tenancy.callers import Caller
from spmd_tx.coordinator.wire.console.runs import (
    MOST_METRICS,
    ChangeRunRequest,
    CurvesResponse,
    LoggedPoint,
    LogMetricsRequest,
    MetricsPoint,
    MetricsResponse,
    OpenRunsResponse,
    Run,
    RunHealth,
    RunSort,
    RunsResponse,
)
from spmd_tx.coordinator.wire.fields import StatusResponse
from spmd_tx.coordinator.wire.page_room import PageRoom
from spmd_tx.errors import InvalidRequest

METRICS = "/api/v1/training_runs/{run_id:str}/metrics"
MOST_POINTS = 5000
MOST_OPEN = 200  # runs
MOST_CURVES = 64  # of an answer
BEGINNING = re.compile(r"[0-9A-Za-z:-]{0,200}")  # of a run's ID
ROW_BYTES = 100  # that a row takes beside its metrics
POINTS = {HTTP_200_OK: ResponseSpec(MetricsResponse, generate_examples=False)}
CURVES = {HTTP_200_OK: ResponseSpec(CurvesResponse, generate_examples=False)}
VARY = {"Vary": "Accept-Encoding"}
STREAM_HEADERS = {"Cache-Control": "no-cache", "Connection": "keep-alive", "X-Accel-Buffering": "no"}


class _CurveChoice(NamedTuple):
    """Says which curves are wanted, and of which part of the axis."""

    names: tuple[str, ...]
    window: CurveWindow


def _choice(
    axis: FromQuery[CurveAxis] = "step",
    first: FromQuery[float | None] = None,
    last: FromQuery[float | None] = None,
    name: FromQuery[list[str] | None] = None,
) -> _CurveChoice:
    names = tuple(name or ())
    if len(names) > MOST_CURVES:
        raise InvalidRequest(f"{len(names)} names; ask for {MOST_CURVES} curves at a time")
    ends = -math.inf if first is None else first, math.inf if last is None else last
    return _CurveChoice(names, CurveWindow(axis, *ends))


def _selected(
    beginning: FromQuery[str] = "",
    search: FromQuery[str] = "",
    sort: FromQuery[RunSort] = "created",
    ascending: FromQuery[bool] = False,
    archived: FromQuery[bool] = False,
) -> RunQuery:
    if BEGINNING.fullmatch(beginning) is None:
        raise InvalidRequest(f"beginning is {beginning[:100]!r}; give the beginning of a run's ID")
    if len(search) > SEARCH_CHARACTERS:
        raise InvalidRequest(f"search has {len(search)} characters; give {SEARCH_CHARACTERS} at most")
    return RunQuery(beginning, search, sort, ascending, archived)


class RunsController(Controller):
    path = "/console/api"

    @polled("/runs", dependencies={"selected": Provide(_selected, sync_to_thread=False)})
    async def runs(
        self,
        call: ApiCall,
        selected: NamedDependency[RunQuery],
        limit: FromQuery[int] = 50,
        cursor: FromQuery[int] = 0,
    ) -> RunsResponse:
        """List the runs that the caller may see, newest first; perhaps only those that a search finds.

        A page ends when its bytes are reached, and a search when it has taken long.
        """
        page = ListingPage(cursor, min(limit, 100)).clamped()
        whose = call.caller.owner, call.caller.role
        key = "runs", *whose, *page, selected, call.services.queue.news.told
        return await call.services.shared_answers.get(
            key, lambda: _listed(call.services, call.caller, selected, page)
        )

    @polled("/runs/{run_id:str}")
    async def run(self, run_id: FromPath[str], call: ApiCall) -> Run:
        """Return a run, with what its client has said of it."""
        model = await call.model(run_id)

        key = "run", model.id, call.services.queue.news.told
        return await call.services.shared_answers.get(key, lambda: _run_of(call.services, model))

    @patch("/runs/{run_id:str}")
    async def change(self, run_id: FromPath[str], data: JSONBody[ChangeRunRequest], call: ApiCall) -> Run:
        """Give a run another name or group in lists, or archive it, or take it back from there."""
        if data == ChangeRunRequest():
            raise InvalidRequest("send name, group or archived")
        model = await call.model(run_id)
        await take_turn(call.request, "changes")
        call.services.quotas.check_metadata(call.caller, len(msgspec.json.encode(data)))
        await call.services.catalog.label_model(model, data, call.caller)
        call.services.queue.news.add(model.id)
        return await _run_of(call.services, await call.services.catalog.model(model.id))

    @polled("/runs/{run_id:str}/metrics", responses=POINTS)
    async def metrics(
        self,
        run_id: FromPath[str],
        call: ApiCall,
        after: FromQuery[int] = -1,
        logged_after: FromQuery[int] = -1,
        limit: FromQuery[int] = MOST_POINTS,
    ) -> Response[bytes]:
        """Return metrics as ``/training_runs/.../metrics`` does, as of the last news or later."""
        selection = _MetricsSelection((await call.model(run_id)).id, after, logged_after, limit)
        key = "metrics", *selection, call.services.queue.news.told
        return _json(await call.services.shared_answers.get(key, lambda: _points(call.services, selection)))

    @polled(
        "/runs/{run_id:str}/curves",
        responses=CURVES,
        dependencies={"choice": Provide(_choice, sync_to_thread=False)},
    )
    async def curves(
        self, run_id: FromPath[str], call: ApiCall, choice: NamedDependency[_CurveChoice]
    ) -> Response[bytes]:
        """Return curves, of at most 1,000 points each, of part of the axis; without names, the first."""
        model = await call.model(run_id)

        async def answer() -> bytes:
            content = await call.services.curves.read(model.id, *choice)
            return await compute(len(content), partial(gzip.compress, content, compresslevel=1))

        key = "curves", model.id, choice, call.services.queue.news.told
        return await _unpacked(await call.services.shared_answers.get(key, answer), call.request)

    @polled("/open_runs")
    async def open_runs(self, call: ApiCall) -> OpenRunsResponse:
        """Say how the newest runs are whose sessions are open: pages ask every few seconds."""
        query = (
            select(ModelRow, SessionRow)
            .join(SessionRow, SessionRow.id == ModelRow.session_id)
            .where(SessionFilter().of(call.caller), SessionRow.ended_at.is_(None))
            .order_by(ModelRow.created_at.desc(), ModelRow.id)
            .limit(MOST_OPEN + 1)
        )

        async def answer() -> OpenRunsResponse:
            states = RunStates(call.services)
            async with call.services.database.reading() as db:
                found = [(model, session) for model, session in await db.execute(query)]
                shown = await states.health(db, found[:MOST_OPEN])
            return OpenRunsResponse(shown, len(found) > MOST_OPEN)

        key = "open runs", call.caller.owner, call.caller.role
        return await call.services.shared_answers.get_costly(key, answer)

    @get("/stream", opt=UNMETERED)
    async def stream(self, call: ApiCall) -> Stream:
        """Send the ids of runs that have new metrics, at most every two seconds."""
        call.services.streams.check(call.caller)
        events = call.services.streams.events(call.caller, call.services.health.closing)
        return Stream(events, media_type="text/event-stream", headers=STREAM_HEADERS)


class RunMetricsController(Controller):
    @polled(METRICS, responses=POINTS)
    async def metrics(
        self,
        run_id: FromPath[str],
        call: ApiCall,
        after: FromQuery[int] = -1,
        logged_after: FromQuery[int] = -1,
        limit: FromQuery[int] = MOST_POINTS,
    ) -> Response[bytes]:
        """Return the steps behind the one with the seq ``after``, and a client's own behind a number."""
        selection = _MetricsSelection((await call.model(run_id)).id, after, logged_after, limit)
        return _json(await _points(call.services, selection))

    @post(METRICS, status_code=HTTP_200_OK)
    async def log(
        self, run_id: FromPath[str], data: JSONBody[LogMetricsRequest], call: ApiCall
    ) -> StatusResponse:
        """Keep what a client knows, of a step of its own or of the next one that the server finishes."""
        if not 0 < len(data.metrics) <= MOST_METRICS:
            raise InvalidRequest(f"metrics has {len(data.metrics)} entries; send 1 to {MOST_METRICS}")
        if data.step is not None and not 0 <= data.step < 2**53:
            raise InvalidRequest(f"step is {data.step}; steps count from 0, and are below 2**53")
        model = await call.model(run_id)
        await take_turn(call.request, "changes")
        await call.services.metric_names.add(model.id, data.metrics)
        async with call.services.database.transaction() as db:
            newest = await rows.highest_number(db, model.id)
            size = await run_metrics.add_of_client(db, model.id, newest, data.step, data.metrics)
            call.services.quotas.check_metrics(call.caller, size + ROW_BYTES)
        call.services.queue.news.add(model.id)
        return StatusResponse("success")


class _MetricsSelection(NamedTuple):
    """Selects metrics of a run."""

    run: str
    after: int  # seq of a point
    logged_after: int  # number of what a client has sent
    limit: int  # of either


async def _points(services: Services, selection: _MetricsSelection) -> bytes:
    after, logged_after = (min(max(place, -1), MAX_OFFSET) for place in selection[1:3])
    most, size = min(max(selection.limit, 1), MOST_POINTS), services.config.bounds.answer_bytes // 2
    async with services.database.reading() as db:
        points = await metric_pages.points(db, selection.run, after, most, size)
        logged = await metric_pages.logged(db, selection.run, logged_after, most, size)
    answer = MetricsResponse(
        cast(list[MetricsPoint], points.entries),
        points.following,
        cast(list[LoggedPoint], logged.entries),
        logged.following,
    )
    return msgspec.json.encode(answer)


async def _listed(services: Services, caller: Caller, query: RunQuery, page: ListingPage) -> RunsResponse:
    bounds, states = services.config.bounds, RunStates(services)
    room, shown, looked_at = PageRoom(bounds.answer_bytes), list[Run](), 0
    end = time.monotonic() + bounds.search_seconds
    rows = query.rows(caller).offset(page.offset)
    if not query.search:
        rows = rows.limit(page.limit + 1)
    async with services.database.reading() as db, aclosing(in_pieces(db, rows, ROWS_AT_ONCE)) as pieces:
        async for model, session, health in _with_health(db, states, query, pieces):
            if query.search and looked_at and time.monotonic() > end:
                return RunsResponse(shown, page.offset + looked_at)
            if health is not None:
                is_full = len(shown) == page.limit
                run = None if is_full else await _run(services, db, model, session, health)
                if run is None or not room.takes(run):
                    return RunsResponse(shown, page.offset + looked_at)
                shown.append(run)
            looked_at += 1
    return RunsResponse(shown, None)


async def _with_health(
    db: AsyncSession,
    states: RunStates,
    query: RunQuery,
    pieces: AsyncIterable[Sequence[Row[ModelRow, SessionRow]]],
) -> AsyncGenerator[tuple[ModelRow, SessionRow, RunHealth | None]]:
    """Yield each run with its health, or with None if it does not fit the query."""
    async for piece in pieces:
        fitting = [(model, session) for model, session in piece if query.fits(model, session)]
        healths = await states.health(db, fitting)
        for model, session in piece:
            yield model, session, healths.get(model.id)


async def _unpacked(packed: bytes, request: Request) -> Response[bytes]:
    """Answer as the client can read it: packed, if it says that it can."""
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(packed, media_type=MediaType.JSON, headers={"Content-Encoding": "gzip", **VARY})
    content = await compute(4 * len(packed), gzip.decompress, packed)
    return Response(content, media_type=MediaType.JSON, headers=VARY)


def _json(content: bytes) -> Response[bytes]:
    return Response(content, media_type=MediaType.JSON)


async def _run_of(services: Services, model: ModelRow) -> Run:
    async with services.database.reading() as db:
        session = await db.get_one(SessionRow, model.session_id)
        health = await RunStates(services).health(db, [(model, session)])
        return await _run(services, db, model, session, health[model.id])


async def _run(
    services: Services, db: AsyncSession, model: ModelRow, session: SessionRow, health: RunHealth
) -> Run:
    summary = await run_metrics.summary(db, model.id)
    return Run(
        id=model.id,
        session_id=model.session_id,
        base_model=model.base_model,
        rank=model.rank,
        owner=session.owner,
        created_at=model.created_at,
        is_open=session.ended_at is None,
        health=health,
        metadata=model.user_metadata or session.user_metadata,
        display_name=session.display_name,
        tags=session.tags,
        steps=summary.steps,
        last_at=summary.last_at,
        last=summary.last,
        alarms=summary.alarms,
        name=model.name,
        group=model.run_group,
        archived_at=model.archived_at,
    )
