"""Whether a request would be served now, as the routes see it."""

import asyncio

from spmd_tx.coordinator.mesh.hub import Hub
from spmd_tx.coordinator.runtime.mesh_record import MeshTimeline
from spmd_tx.coordinator.wire.sessions import ProgramsHealth


class ServerHealth:
    """Holds what the server sets as it starts, runs and ends."""

    def __init__(self, workers: Hub) -> None:
        self.ready = False  # whether workers run commands
        self.refusal: str | None = None  # why no more work is taken
        self.closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._workers = workers

    @property
    def phase(self) -> str:
        """What the server is doing: "loading weights 45 %"."""
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
