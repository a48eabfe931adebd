"""Requests as a timeline in the JSON format of Chrome's traces, which Perfetto opens. Pure.

A process of the trace is a model or a sampler; its threads are lanes, as many as requests overlap. A request
is a slice from its arrival to the moment when its result was stored, with four slices in it:

- queued: until its turn came in its model's line, or its sampler's weights were known
- batched: prepared, and waiting for company and for its share of the device
- device: from its first command to the last reply, with the commands of others in between
- encoded: its result is cut out, encoded and stored
"""

import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

STAGES = ("queued", "batched", "device", "encoded")

Event = dict[str, Any]


class TracedRequest(NamedTuple):
    """What the log knows. Times in seconds since the epoch, None: it did not come so far."""

    number: int
    kind: str
    line: str
    seq_id: int
    created_at: float
    began_at: float | None
    sent_at: float | None
    replied_at: float | None
    finished_at: float | None
    tokens: int | None
    category: str | None  # of a failure


def write(requests: Sequence[TracedRequest], now: float, about: dict[str, Any]) -> Iterator[bytes]:
    """The file, piece by piece. ``about`` is told in its header; what is unfinished lasts until ``now``."""
    yield b'{"otherData":' + msgspec.json.encode(about) + b',"traceEvents":[\n'
    separator = b""
    for event in events(requests, now):
        yield separator + msgspec.json.encode(event)
        separator = b",\n"
    yield b"\n]}\n"


def events(requests: Iterable[TracedRequest], now: float) -> Iterator[Event]:
    """In any order; times in microseconds, so that slices nest exactly."""
    by_line: dict[str, list[TracedRequest]] = {}
    for request in sorted(requests, key=lambda each: (each.created_at, each.number)):
        by_line.setdefault(request.line, []).append(request)
    for process, (line, of_line) in enumerate(sorted(by_line.items()), 1):
        yield _meta("process_name", process, 0, name=line)
        yield _meta("process_sort_index", process, 0, sort_index=process)
        lanes: list[tuple[int, int]] = []  # when each is free again, and its number
        for request in of_line:
            begin, *ends = _boundaries(request, now)
            lane = heapq.heappop(lanes)[1] if lanes and lanes[0][0] <= begin else len(lanes) + 1
            if lane == len(lanes) + 1:
                yield _meta("thread_name", process, lane, name=f"lane {lane}")
            heapq.heappush(lanes, (ends[-1], lane))
            yield from _slices(request, begin, ends, process, lane)


def _slices(request: TracedRequest, begin: int, ends: list[int], process: int, lane: int) -> Iterator[Event]:
    place = {"ph": "X", "pid": process, "tid": lane, "cat": request.kind}
    told = {
        "seq_id": request.seq_id,
        "number": request.number,
        "tokens": request.tokens,
        "failed": request.category,
        "unfinished": request.finished_at is None or None,
    }
    yield place | {
        "name": f"{request.kind} {request.seq_id}",
        "ts": begin,
        "dur": ends[-1] - begin,
        "args": {name: value for name, value in told.items() if value is not None},
    }
    if request.finished_at is None:
        return
    for stage, end in zip(STAGES, ends, strict=True):
        if end > begin:
            yield place | {"name": stage, "ts": begin, "dur": end - begin}
        begin = end


def _boundaries(request: TracedRequest, now: float) -> list[int]:
    """Where the stages begin, and the last one ends, in microseconds; never backwards.

    A stage that a request never reached has no length: what failed in the line was queued to its end.
    """
    finished = now if request.finished_at is None else request.finished_at
    times = [request.created_at, request.began_at, request.sent_at, request.replied_at]
    boundaries = [int(request.created_at * 1e6)]
    last = int(max(finished, request.created_at) * 1e6)
    for time in times[1:]:
        reached = last if time is None else int(time * 1e6)
        boundaries.append(min(max(reached, boundaries[-1]), last))
    return [*boundaries, last]


def _meta(what: str, process: int, lane: int, **told: object) -> Event:
    return {"ph": "M", "name": what, "pid": process, "tid": lane, "args": told}
