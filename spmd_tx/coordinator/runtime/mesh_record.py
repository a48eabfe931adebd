"""Remembers what became of the workers, for those who look at the server. In memory; decides nothing."""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from spmd_tx.coordinator.runtime import clock
from spmd_tx.protocol.memory_plan import MemoryPlan

MOST_GENERATIONS = 50
MOST_PROGRAMS = 100


@dataclass
class GenerationRecord:
    """Tells of one generation of workers. Times are in seconds since the epoch; None: not yet."""

    number: int
    began_at: float
    ready_at: float | None = None
    ended_at: float | None = None
    reason: str | None = None  # why it ended


class ProgramRecord(NamedTuple):
    """Tells of one program that workers have compiled, or loaded from their cache."""

    program: str
    seconds: float
    ended_at: float  # seconds since the epoch
    waiting: int  # sessions that waited for it
    error: str | None


@dataclass(frozen=True)
class MenuProgress:
    """Says how much of the menu is ready, and what is being compiled."""

    ready: int
    planned: int
    compiling: tuple[str, ...] = ()


class MeshTimeline:
    """Holds the last generations and programs, and what the present workers have reported."""

    def __init__(self) -> None:
        self.generations: deque[GenerationRecord] = deque(maxlen=MOST_GENERATIONS)  # oldest first
        self.programs: deque[ProgramRecord] = deque(maxlen=MOST_PROGRAMS)  # oldest first
        self.started_at = clock.now()  # of the server
        self.busy: str | None = "starting"  # what the workers do instead of running commands
        self.is_restarting = False  # whether workers were lost, and the next ones are not ready
        self.menu: MenuProgress | None = None  # None: nothing is planned or being compiled
        self.mesh: dict[str, int] = {}  # sizes by axis; empty: not chosen yet
        self.hosts: list[str] = []  # of each process
        self.device: str | None = None  # "8 x cpu"
        self.plan: MemoryPlan | None = None

    def began(self, number: int, mesh: dict[str, int], hosts: list[str]) -> None:
        self.mesh, self.hosts = mesh, hosts
        self.generations.append(GenerationRecord(number, clock.now()))

    def ready(self, device: str, plan: MemoryPlan) -> None:
        self.device, self.plan, self.busy, self.is_restarting = device, plan, None, False
        if self.generations:
            self.generations[-1].ready_at = clock.now()

    def lost(self, reason: str) -> None:
        self.is_restarting = True
        if self.generations:
            self.generations[-1].ended_at, self.generations[-1].reason = clock.now(), reason

    def outages(self, until: float) -> list[tuple[float, float]]:
        """List the times without workers that run commands, from the first known generation on."""
        found, since = [], self.generations[0].began_at if self.generations else until
        for each in self.generations:
            if each.ready_at is not None:
                found.append((since, each.ready_at))
                since = until if each.ended_at is None else each.ended_at
        return [*found, (since, until)] if since < until else found
