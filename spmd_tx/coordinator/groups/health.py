"""How one group of workers is, as routes, the log and its requests see it."""

from typing import Literal

from spmd_tx.config import ServerConfig
from spmd_tx.coordinator.bases.served_base import ServedBase
from spmd_tx.coordinator.mesh.hub import Hub
from spmd_tx.coordinator.runtime.mesh_record import MeshTimeline
from spmd_tx.coordinator.wire.sessions import ProgramsHealth

GroupRole = Literal["train and sample", "sample"]
GroupPhase = Literal["waiting for agents", "starting", "ready", "draining", "restarting", "failed"]


class GroupHealth:
    """Holds what the group's run sets, beside what its hub knows."""

    def __init__(self, config: ServerConfig, base: ServedBase, workers: Hub) -> None:
        self.name, self.base, self.base_key = config.group, base.name, base.key
        self.role: GroupRole = "train and sample" if config.trains else "sample"
        self.ready = False  # whether workers run commands
        self.is_leaving = False  # whether one of them has to leave, so that nothing new begins there
        self.problem: str | None = None  # why it has failed; it is tried again
        self._workers = workers

    @property
    def state(self) -> GroupPhase:
        if self.problem is not None:
            return "failed"
        if self.ready:
            return "draining" if self.is_leaving else "ready"
        if (self._workers.busy or "").startswith("waiting for the agent"):
            return "waiting for agents"
        return "restarting" if self._workers.loss is not None else "starting"

    @property
    def phase(self) -> str:
        """What the group is doing: "loading weights 45 %"."""
        if self.problem is not None:
            return f"failed, and tried again later: {self.problem}"
        return self._workers.busy or ("running" if self.ready else "starting")

    @property
    def record(self) -> MeshTimeline:
        """What became of the workers so far."""
        return self._workers.record

    @property
    def programs(self) -> ProgramsHealth | None:
        """How much of what is compiled ahead is ready; None without a warm-up."""
        now = self._workers.programs.shown
        return now and ProgramsHealth(now.ready, now.planned, ", ".join(now.compiling) or None)
