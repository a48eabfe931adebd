"""The route that shows where the time of a run goes."""

import asyncio
import math
from collections.abc import Collection, Sequence
from functools import partial

from litestar import Controller
from litestar.params import FromPath, FromQuery
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from spmd_tx.coordinator.bases.health import GroupHealth, trainer_first
from spmd_tx.coordinator.http.answer_guard import polled
from spmd_tx.coordinator.http.console import time_words
from spmd_tx.coordinator.http.services import ApiCall, Services
from spmd_tx.coordinator.requests.runs import time_shares
from spmd_tx.coordinator.requests.runs.recent import KEPT_SECONDS, SLICE_SECONDS, RunLine, Timed
from spmd_tx.coordinator.requests.runs.time_shares import DeviceSeconds, StageSegment, TimeSpan
from spmd_tx.coordinator.runtime import clock
from spmd_tx.coordinator.storage.tables import ModelRow, SamplerRow
from spmd_tx.coordinator.wire.console.run_timing import GroupOfRun, RunTiming, Share, TimedRequest, TimeSlice
from spmd_tx.errors import InvalidRequest

DEFAULT_SECONDS = 300.0
MOST_SHOWN = 500  # requests
MOST_REASONS = 10  # of the oldest unfinished requests, since finding them out takes a while
KEYS_PER_QUERY = 500


class TimelineController(Controller):
    path = "/console/api/runs"

    @polled("/{run_id:str}/timing")
    async def timing(
        self, run_id: FromPath[str], call: ApiCall, seconds: FromQuery[float] = DEFAULT_SECONDS
    ) -> RunTiming:
        """Return what a run waited for in the last seconds: its model, and the samplers beside it."""
        if math.isnan(seconds):
            raise InvalidRequest("seconds is not a number; name the length of the time to be shown")
        model = await call.model(run_id)
        length = SLICE_SECONDS * math.ceil(min(max(seconds, SLICE_SECONDS), KEPT_SECONDS) / SLICE_SECONDS)

        async def answer() -> RunTiming:
            until = clock.now()
            known_since = max(model.created_at, call.services.queue.recent.known_since)
            window = max(until - length, min(known_since, until - SLICE_SECONDS)), until
            key = call.services.bases.key_of_row(model.base_model)
            groups = trainer_first(call.services.health.groups, key)
            requests = await _requests(call.services, model, window)
            return await _timing(call.services, groups, requests, window, is_operator=is_operator)

        is_operator = call.caller.role == "admin"
        key = "timing", model.id, length, is_operator
        return await call.services.shared_answers.get_costly(key, answer)


async def _requests(services: Services, model: ModelRow, window: TimeSpan) -> list[Timed]:
    """Find the requests of a run that were unfinished at some time in a window."""
    queue = services.queue
    in_window = [*queue.recent.ended_since(window[0]), *queue.at_work()]
    requests = [timed for timed in in_window if timed.request.session_id == model.session_id]
    lines = {timed.request.line for timed in requests}
    if lines - {model.id}:
        async with services.database.reading() as db:
            lines -= await _of_other_models(db, model, lines)
    return [timed for timed in requests if timed.request.line in lines]


async def _of_other_models(db: AsyncSession, model: ModelRow, lines: Collection[str]) -> set[str]:
    """Find the other models of a run's session, and the samplers of their weights."""
    models = set(await db.scalars(select(ModelRow.id).where(ModelRow.session_id == model.session_id))) - {
        model.id
    }
    if not models:
        return models
    names, found, paths = sorted(lines), set(models), tuple(f"tinker://{other}/" for other in models)
    for start in range(0, len(names), KEYS_PER_QUERY):
        some = SamplerRow.id.in_(names[start : start + KEYS_PER_QUERY])
        query = select(SamplerRow.id, SamplerRow.model_id, SamplerRow.model_path).where(some)
        for sampler, of_model, path in await db.execute(query):
            if of_model in models or (path or "").startswith(paths):
                found.add(sampler)
    return found


async def _timing(
    services: Services,
    groups: Sequence[GroupHealth],
    requests: Sequence[Timed],
    window: TimeSpan,
    *,
    is_operator: bool,
) -> RunTiming:
    """Say where the time of a run went. ``groups`` are those of its base model; the first one trains it."""
    until = window[1]
    lines = {(each.request.session_id, each.request.line) for each in requests}
    devices = _device_seconds(services, [group.name for group in groups], lines, window)
    first, is_only = groups[0] if groups else None, len(services.health.groups) == 1
    outages = first.record.outages(until) if first else [window]
    staged, slices = await asyncio.to_thread(_shares, requests, outages, window, devices)
    seconds = time_shares.total(slices)
    shown = sorted(staged, key=lambda each: each[0].request.number)[-MOST_SHOWN:]
    waiting = [timed.request.id for timed, _ in shown if timed.finished_at is None][:MOST_REASONS]
    reasons = {request_id: services.scheduler.status(request_id).reason for request_id in waiting}
    helps = partial(time_words.advice, is_operator=is_operator)
    return RunTiming(
        since=window[0],
        until=until,
        summary=time_words.summary(seconds) if requests else time_words.IDLE,
        group=GroupOfRun(first.name, is_only, first.state, first.phase) if first else None,
        shares=[
            Share(cause, seconds[cause], helps(cause) if requests else "")
            for cause in time_shares.largest_first(seconds)
            if seconds[cause] > 0
        ],
        slices=slices,
        requests=[_shown(*each, reasons.get(each[0].request.id)) for each in shown],
        is_cut=len(staged) > len(shown),
    )


def _shares(
    requests: Sequence[Timed], outages: Sequence[TimeSpan], window: TimeSpan, devices: DeviceSeconds
) -> tuple[list[tuple[Timed, list[StageSegment]]], list[TimeSlice]]:
    """Divide requests into stages, and a window among causes. Takes a second for many requests; blocks."""
    staged = [(timed, time_shares.segments(timed, window[1])) for timed in requests]
    stages = [stage for _, stages in staged for stage in stages]
    return staged, time_shares.slices(stages, outages, window, SLICE_SECONDS, devices)


def _device_seconds(
    services: Services, groups: Collection[str], lines: Collection[RunLine], window: TimeSpan
) -> DeviceSeconds:
    """Say how long devices of some groups worked for some lines, and how long for others, in each slice."""
    first, last = (int(moment // SLICE_SECONDS) for moment in window)
    by_slice = dict[int, tuple[float, float]]()
    for number in range(first, last + 1):
        devices = services.queue.recent.devices(number * SLICE_SECONDS)
        own_seconds = sum(seconds for line, seconds in devices.by_line.items() if line in lines)
        total = sum(devices.by_group.get(group, 0.0) for group in groups)
        own_seconds = min(own_seconds, total)  # lines may share a command
        by_slice[number] = own_seconds, total - own_seconds
    return lambda at: by_slice.get(int(at // SLICE_SECONDS), (0.0, 0.0))


def _shown(timed: Timed, stages: Sequence[StageSegment], reason: str | None) -> TimedRequest:
    request, is_open = timed.request, timed.finished_at is None
    state = "unfinished" if is_open else "failed" if timed.tokens is None else "finished"
    return TimedRequest(
        number=request.number,
        kind=request.kind,
        line=request.line,
        seq_id=request.seq_id,
        stages=[*stages],
        state=state,
        tokens=timed.tokens,
        reason=reason,
    )
