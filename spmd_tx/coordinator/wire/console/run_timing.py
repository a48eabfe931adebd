"""Where the time of a run goes, as the console reads it. Times are seconds since the epoch."""

import msgspec


class Stage(msgspec.Struct, frozen=True, array_like=True):
    """Says that a request was queued, batched, compiling, on a device or encoded."""

    name: str
    begin: float
    end: float


class TimedRequest(msgspec.Struct, frozen=True):
    """Describes a request of the last minutes."""

    number: int  # order of acceptance on this server
    kind: str
    line: str  # id of the model or sampler
    seq_id: int
    stages: list[Stage]  # in order, without gaps
    state: str  # "unfinished", "finished" or "failed"
    tokens: int | None  # read and sampled
    reason: str | None  # why it waits; of the oldest unfinished ones only


class Share(msgspec.Struct, frozen=True):
    """Says how much of the window one cause took, and what helps against it."""

    cause: str  # device, queue, compile, client, restart or server
    seconds: float
    advice: str


class TimeSlice(msgspec.Struct, frozen=True):
    at: float
    seconds: dict[str, float]  # by cause


class RunTiming(msgspec.Struct, frozen=True):
    """Describes a window that ends now."""

    since: float
    until: float
    summary: str  # a sentence
    shares: list[Share]  # largest first
    slices: list[TimeSlice]  # oldest first
    requests: list[TimedRequest]  # in order of acceptance
    is_cut: bool  # whether there were more requests than are shown
