"""Says where the time of a run goes: from the stages of its requests and the work of devices. Pure.

At each moment the request that has come furthest decides; while there is none, the time is the client's. Of
the time in which requests are on devices or wait for them, the seconds of its own commands are "device",
those in which devices worked for others are "queue", and the rest is "server".
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from spmd_tx.coordinator.requests.runs.recent import Timed
from spmd_tx.coordinator.wire.console.run_timing import Cause, Stage, TimeSlice

CAUSES: tuple[Cause, ...] = ("device", "queue", "compile", "client", "restart", "server")
OUTAGE = "outage"  # no workers run commands

TimeSpan = tuple[float, float]  # seconds since the epoch
# Seconds for the run and for others, in the slice that holds a time
DeviceSeconds = Callable[[float], tuple[float, float]]


class StageSegment(NamedTuple):
    """Says that a request was in one stage. Times are in seconds since the epoch."""

    stage: Stage
    begin: float
    end: float


def segments(timed: Timed, now: float) -> list[StageSegment]:
    """Cut a request's time into stages; an unfinished one is in its last stage until now."""
    times, end = timed.times, now if timed.finished_at is None else timed.finished_at
    sent = end if times.sent_at is None else times.sent_at
    replied = end if timed.finished_at is None or times.replied_at is None else times.replied_at
    bounds = [times.accepted_at]
    for moment in (end if times.began_at is None else times.began_at, sent, replied, end):
        bounds.append(min(max(moment, bounds[-1]), end))
    stages: tuple[Stage, ...] = ("queued", "batched", "device", "encoded")
    compiling = list(times.compiled)
    if times.compiling_since is not None:
        compiling.append((times.compiling_since, end))
    segments = []
    for stage, span in zip(stages, pairwise(bounds), strict=True):
        segments += _cut_out(stage, span, compiling)
    return segments


def _cut_out(stage: Stage, span: TimeSpan, compiling: Sequence[TimeSpan]) -> list[StageSegment]:
    """Divide the time of a stage into itself and waits for programs, which come in order."""
    segments, begin = list[StageSegment](), span[0]
    for start, stop in compiling:
        start, stop = max(start, begin), min(stop, span[1])
        if stop > start:
            segments += [StageSegment(stage, begin, start), StageSegment("compiling", start, stop)]
            begin = stop
    return [each for each in [*segments, StageSegment(stage, begin, span[1])] if each.end > each.begin]


def slices(
    stages: Iterable[StageSegment],
    outages: Sequence[TimeSpan],
    window: TimeSpan,
    length: float,
    devices: DeviceSeconds,
) -> list[TimeSlice]:
    """Divide a window among the causes; all slices but the first and last have this length in seconds."""
    since, until = window
    starts = [since]
    while (following := (starts[-1] // length + 1) * length) < until:
        starts.append(following)
    nothing: dict[Cause, float] = dict.fromkeys(CAUSES, 0.0)
    time_slices = [TimeSlice(start, {**nothing}) for start in starts]
    first = int(since // length)
    waiting = [0.0] * len(time_slices)
    for what, begin, end in _moments(stages, outages, window):
        while begin < end:
            place = int(begin // length) - first
            stop = min(end, (first + place + 1) * length)
            if what == "waiting":
                waiting[place] += stop - begin
            else:
                time_slices[place].seconds[what] += stop - begin
            begin = stop
    for each, wait in zip(time_slices, waiting, strict=True):
        _share(each.seconds, wait, *devices(each.at))
    return time_slices


def total(slices: Sequence[TimeSlice]) -> dict[Cause, float]:
    """Add up the seconds of each cause."""
    return {cause: sum(each.seconds[cause] for each in slices) for cause in CAUSES}


def largest_first(seconds: Mapping[Cause, float]) -> list[Cause]:
    return sorted(seconds, key=lambda cause: -seconds[cause])


def _share(seconds: dict[Cause, float], wait: float, own_seconds: float, others: float) -> None:
    """Divide the time on devices, and that of waiting for them, by whose commands they carried out."""
    on_devices, seconds["device"] = seconds["device"], min(seconds["device"], own_seconds)
    not_own = on_devices - seconds["device"] + wait
    seconds["queue"] = min(not_own, others)
    seconds["server"] += not_own - seconds["queue"]


def _moments(
    stages: Iterable[StageSegment], outages: Sequence[TimeSpan], window: TimeSpan
) -> Iterable[tuple[Cause | Literal["waiting"], float, float]]:
    """List what the run was doing, without gaps or overlaps."""
    spans: list[tuple[str, float, float]] = [*stages, *((OUTAGE, *span) for span in outages)]
    changes: list[tuple[float, str, int]] = []
    for what, begin, end in spans:
        begin, end = max(begin, window[0]), min(end, window[1])
        if end > begin:
            changes += [(begin, what, 1), (end, what, -1)]
    count, now = Counter[str](), window[0]
    for at, what, change in [*sorted(changes), (window[1], OUTAGE, 0)]:
        if at > now:
            yield _doing(count), now, at
            now = at
        count[what] += change


def _doing(count: Mapping[str, int]) -> Cause | Literal["waiting"]:
    is_waiting = count["queued"] + count["batched"] > 0
    if count[OUTAGE] and (is_waiting or count["device"] or count["compiling"]):
        return "restart"
    if count["device"]:
        return "device"
    if count["compiling"]:
        return "compile"
    if is_waiting:
        return "waiting"
    return "server" if count["encoded"] else "client"
