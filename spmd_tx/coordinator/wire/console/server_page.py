"""The state of the server, as the console shows it to admins. Times are seconds since the epoch."""

from typing import Literal

import msgspec


class Generation(msgspec.Struct, frozen=True):
    """Tells of one generation of workers; null: not yet."""

    number: int
    began_at: float
    ready_at: float | None
    ended_at: float | None
    reason: str | None  # why it ended


class CompiledProgram(msgspec.Struct, frozen=True):
    program: str
    seconds: float
    ended_at: float
    waiting: int  # sessions that waited for it
    error: str | None


class ProgramProgress(msgspec.Struct, frozen=True):
    ready: int  # of those planned
    planned: int
    compiling: str | None
    recent: list[CompiledProgram]  # newest first


class MemoryUse(msgspec.Struct, frozen=True):
    use: str
    bytes: int  # of each device
    note: str


class DeviceMemory(msgspec.Struct, frozen=True):
    device_bytes: int  # that may be used of each device
    uses: list[MemoryUse]
    choices: list[tuple[str, str]]  # what, and the choice


class Tenant(msgspec.Struct, frozen=True):
    """Describes the work of one owner in the window."""

    owner: str
    waiting: int  # unfinished requests whose first command is not sent
    running: int  # unfinished requests whose first command is sent
    oldest_seconds: float | None  # age of the oldest unfinished request
    finished: int  # requests
    wait_median: float | None  # seconds from acceptance to the first command
    wait_most: float | None
    tokens: int
    device_share: float  # of the time in which devices worked for anybody


class UnfinishedRequest(msgspec.Struct, frozen=True):
    """Tells of a request that is not finished yet."""

    id: str
    kind: str
    line: str
    owner: str
    seconds: float  # since it was accepted
    is_running: bool  # whether its first command is sent
    reason: str | None  # why it waits


class Throughput(msgspec.Struct, frozen=True):
    """Holds what was done in one slice of the window."""

    at: float
    trained: float  # tokens per second of requests that ended
    sampled: float  # tokens per second, with those of prompts
    busy: float  # share of the time in which devices worked, the mean of all groups


class Disk(msgspec.Struct, frozen=True):
    free_bytes: int | None
    bytes_by_kind: dict[str, int]  # in the data directory; empty: not measured yet
    problem: str | None  # why no new work is taken


class Suspect(msgspec.Struct, frozen=True):
    """Tells of a request that may have ended workers or the server, or that was given up."""

    id: str
    kind: str
    line: str
    owner: str
    state: str
    losses: int  # generations that ended while its command was out
    coordinator_losses: int  # ends of the server at work on it
    reason: str | None


class ServerGroup(msgspec.Struct, frozen=True):
    """Describes the workers of one base model."""

    name: str
    base_model: str
    role: Literal["train and sample", "sample"]
    state: str  # "waiting for agents", "starting", "ready", "draining", "restarting" or "failed"
    phase: str  # what it does, or why it has failed
    waiting: int  # unfinished requests whose first command is not sent
    running: int  # unfinished requests whose first command is sent
    busy: float  # share of the window in which its devices worked
    mesh: dict[str, int]  # sizes by axis; empty: not chosen yet
    device: str | None
    hosts: list[str]  # of each process
    generations: list[Generation]  # newest first
    programs: ProgramProgress
    memory: DeviceMemory | None  # null: no workers were ready yet


class ServerPage(msgspec.Struct, frozen=True):
    version: str
    started_at: float
    now: float
    phase: str
    is_ready: bool
    refusal: str | None  # why no new work is taken: the server ends
    groups: list[ServerGroup]
    window_seconds: float  # of tenants and throughput
    tenants: list[Tenant]  # most device time first
    queue: list[UnfinishedRequest]  # oldest first
    queue_length: int  # with those that the list leaves out
    throughput: list[Throughput]  # oldest first
    disk: Disk
    suspects: list[Suspect]
