"""Where the time of a run goes, as the console reads it. Times are seconds since the epoch."""

from typing import Literal

import msgspec

Stage = Literal["queued", "batched", "compiling", "device", "encoded"]
Cause = Literal["device", "queue", "compile", "client", "restart", "server"]


class TimedRequest(msgspec.Struct, frozen=True):
    """Describes a request of the last minutes."""

    number: int  # order of acceptance on this server
    kind: str
    line: str  # id of the model or sampler
    seq_id: int
    stages: list[tuple[Stage, float, float]]  # with begin and end; in order, without gaps
    state: Literal["unfinished", "finished", "failed"]
    tokens: int | None  # read and sampled
    reason: str | None  # why it waits; of the oldest unfinished ones only


class Share(msgspec.Struct, frozen=True):
    """Says how much of the window one cause took, and what helps against it."""

    cause: Cause
    seconds: float
    advice: str


class TimeSlice(msgspec.Struct, frozen=True):
    """Holds the seconds of each cause in one part of a window."""

    at: float  # where it begins
    seconds: dict[Cause, float]


class GroupOfRun(msgspec.Struct, frozen=True):
    """Describes the workers that a run needs."""

    name: str
    is_only: bool  # whether the server has no other group
    state: str  # "waiting for agents", "starting", "ready", "draining", "restarting" or "failed"
    phase: str  # what it does, or why it has failed


class RunTiming(msgspec.Struct, frozen=True):
    """Describes a window that ends now."""

    since: float
    until: float
    summary: str  # a sentence
    group: GroupOfRun | None  # null: its base model is not served now
    shares: list[Share]  # largest first
    slices: list[TimeSlice]  # oldest first
    requests: list[TimedRequest]  # in order of acceptance
    is_cut: bool  # whether there were more requests than are shown
