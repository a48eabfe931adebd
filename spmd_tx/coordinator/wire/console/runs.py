"""Runs and their metrics, as the console and ``spmd-tx runs`` read them, and as clients send them."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from spmd_tx.coordinator.wire.fields import Label, ShortLabel

MOST_METRICS = 256  # in one message of a client


RunSort = Literal["created", "changed", "group", "model", "rank", "owner"]
RunState = Literal["running", "waiting", "silent", "left", "finished", "errored", "interrupted"]


class RunFailure(msgspec.Struct, frozen=True):
    """Says which request of a run has failed, and why."""

    request_id: str
    kind: str  # of the request, such as "forward_backward"
    category: Literal["user", "server"]  # whose fault it is
    error: str
    at: float  # seconds since the epoch


class RunHealth(msgspec.Struct, frozen=True):
    """Says how a run is now."""

    state: RunState
    reason: str | None  # what it waits for, or how it has ended
    failed: int  # requests that have failed in the last minutes
    last_failure: RunFailure | None = None  # of the last minutes, also of a run that has ended


class Run(msgspec.Struct, frozen=True):
    """Describes a training run. Times are seconds since the epoch."""

    id: str
    session_id: str
    base_model: str
    rank: int
    owner: str
    created_at: float
    is_open: bool  # whether its session is
    health: RunHealth
    metadata: dict[str, object] | None  # of its client
    display_name: str | None  # of its session
    tags: list[str]  # of its session
    steps: int  # that are kept
    last_at: float | None  # of its newest metrics
    last: dict[str, float | None]  # the newest value of each metric; null: not finite
    alarms: list[str]  # what its newest metrics say that needs a look
    name: str | None  # that people have given it
    group: str | None  # that people have put it into
    archived_at: float | None  # null: it is not


class ChangeRunRequest(msgspec.Struct, frozen=True):
    """Changes under what a run is listed. What is left out stays as it is."""

    name: ShortLabel | UnsetType | None = UNSET  # null: the one of its client
    group: ShortLabel | UnsetType | None = UNSET  # null: none
    archived: bool | UnsetType = UNSET


class OpenRunsResponse(msgspec.Struct, frozen=True):
    runs: dict[str, RunHealth]  # of the newest runs whose sessions are open, by id
    is_cut: bool  # whether there are more


class RunsResponse(msgspec.Struct, frozen=True):
    runs: list[Run]  # in the order that was asked for
    next_cursor: int | None  # null: there are no more; a search that takes long gives few at a time


class MetricsPoint(msgspec.Struct, frozen=True):
    """Holds the metrics of one optimizer step, and of the passes since the step before."""

    seq: int
    step: int  # optimizer steps before it
    at: float
    metrics: dict[str, float | None]  # null: not finite


class LoggedPoint(msgspec.Struct, frozen=True):
    """Holds what a client has sent of one of its own steps."""

    number: int  # order of arrival
    step: int  # as the client counts, which need not be as the server does
    at: float
    metrics: dict[str, float | None]  # null: not finite


class MetricsResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    points: list[MetricsPoint]  # oldest first
    next_after: int | None  # to ask for the next ones; null: there are none now
    logged: list[LoggedPoint] = []  # in order of arrival; a later one of the same step adds to it
    next_logged_after: int | None = None  # as next_after


class RunCurve(msgspec.Struct, frozen=True):
    """Holds a metric over an axis, in its order. Points of long curves stand for a stretch of the axis."""

    name: str
    x: list[float]  # steps, or seconds since the first point of the run
    y: list[float | None]  # the mean of a stretch; null: not finite
    low: list[float | None] | None  # the least value of each stretch; null: each point is one value
    high: list[float | None] | None  # the greatest


class CurvesResponse(msgspec.Struct, frozen=True):
    names: list[str]  # of all metrics of the run, those that most readers want first
    curves: list[RunCurve]  # of those that were asked for


class LogMetricsRequest(msgspec.Struct, frozen=True):
    """Carries what a client knows of a step, such as its reward."""

    metrics: dict[Label, float]
    step: int | None = None  # of the client's own count, from 0; null: the server's next finished step
