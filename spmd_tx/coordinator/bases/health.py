"""Whether a request would be served now: how the groups of workers are, and the server as a whole."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.runtime.mesh_record import MeshTimeline
from spmd_tx.coordinator.wire.sessions import ProgramsHealth

GroupRole = Literal["train and sample", "sample"]
GroupPhase = Literal["waiting for agents", "starting", "ready", "draining", "restarting", "failed"]


def role_of(config: ServerConfig) -> GroupRole:
    """Say what a group with these options does."""
    return "train and sample" if config.trains else "sample"


@dataclass(eq=False)
class GroupHealth:
    """Holds what the group's run sets, beside what is known of its workers."""

    name: str
    base: str  # the name of its base model
    base_key: str
    role: GroupRole
    record: MeshTimeline = field(default_factory=MeshTimeline)  # what became of its workers so far
    problem: str | None = None  # why it has failed; it is tried again
    ready: bool = False  # whether workers run commands
    is_leaving: bool = False  # whether one of them has to leave, so that nothing new begins there

    @property
    def state(self) -> GroupPhase:
        if self.problem is not None:
            return "failed"
        if self.ready:
            return "draining" if self.is_leaving else "ready"
        if (self.record.busy or "").startswith("waiting for the agent"):
            return "waiting for agents"
        return "restarting" if self.record.is_restarting else "starting"

    @property
    def phase(self) -> str:
        """What the group is doing: "loading weights 45 %"."""
        if self.problem is not None:
            return f"failed, and tried again later: {self.problem}"
        return self.record.busy or ("running" if self.ready else "starting")

    def story(self) -> str:
        return f"group {self.name} has {self.phase}"

    @property
    def programs(self) -> ProgramsHealth | None:
        """How much of what is compiled ahead is ready; None without a warm-up."""
        now = self.record.menu
        return now and ProgramsHealth(now.ready, now.planned, ", ".join(now.compiling) or None)


class ServerHealth:
    """Holds what the server sets as it ends, beside what is known of its groups."""

    def __init__(self, groups: Sequence[GroupHealth]) -> None:
        self.groups = list(groups)
        self.refusal: str | None = None  # why no more work is taken
        # Done when long polls must end.
        self.closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def replace(self, late: GroupHealth, opened: GroupHealth) -> None:
        """Note that a group could be opened."""
        self.groups[self.groups.index(late)] = opened

    @property
    def ready(self) -> bool:
        """Whether any workers run commands."""
        return any(group.ready for group in self.groups)

    @property
    def phase(self) -> str:
        """What the server is doing: "loading weights 45 %"."""
        if len(self.groups) == 1:
            return self.groups[0].phase
        return "; ".join(f"{group.name}: {group.phase}" for group in self.groups)

    def problem_of(self, base: str) -> str | None:
        """Say why nothing can be carried out on a base model, by its key; None: it can, sooner or later."""
        groups = [group for group in self.groups if group.base_key == base]
        if not groups or any(group.problem is None for group in groups):
            return None
        return "; ".join(group.story() for group in groups)

    @property
    def programs(self) -> ProgramsHealth | None:
        """How much of what the first group compiles ahead is ready; None without a warm-up."""
        return self.groups[0].programs


def trainer_first(groups: Iterable[GroupHealth], base: str) -> list[GroupHealth]:
    """Return the groups of a base model, by its key; first the one that trains it."""
    return sorted((each for each in groups if each.base_key == base), key=lambda each: each.role == "sample")
