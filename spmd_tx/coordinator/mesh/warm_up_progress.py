"""Reports how far the workers are with compiling, for health checks and for Prometheus."""

import logging

from spmd_tx.coordinator.mesh.program_orders import ProgramOrder
from spmd_tx.coordinator.runtime import clock, metrics
from spmd_tx.coordinator.runtime.mesh_record import MenuProgress, MeshTimeline, ProgramRecord
from spmd_tx.protocol.programs import CompileReport

logger = logging.getLogger(__name__)


class CompileProgress:
    """Follows one generation of workers after the other."""

    def __init__(self, record: MeshTimeline | None = None) -> None:
        self._record = record or MeshTimeline()
        self.begin()

    def begin(self) -> None:
        """Start again for new workers, which have compiled nothing."""
        self._last = CompileReport()
        self.show(MenuProgress(0, 0))

    def show(self, progress: MenuProgress) -> None:
        """Publish how much of the plan is ready."""
        before, ready, planned = self._record.menu, progress.ready, progress.planned
        self._record.menu = progress if planned or progress.compiling else None
        metrics.PROGRAMS_PLANNED.labels(metrics.group()).set(planned)
        metrics.PROGRAMS_READY.labels(metrics.group()).set(ready)
        if 0 < planned == ready and not (before and before.ready == before.planned):
            logger.info("all %d programs are ready: no request has to wait for one", planned)

    def compiled(self, order: ProgramOrder, seconds: float, error: str | None) -> None:
        """Note an order that all workers have answered."""
        waiting = len(order.sessions)
        self._record.programs.append(ProgramRecord(str(order.program), seconds, clock.now(), waiting, error))

    def take(self, report: CompileReport) -> None:
        """Add the news of the next report of process 0, whose counts are since the workers started."""
        before = {(each.program, each.source): each for each in self._last.counts}
        for each in report.counts:
            last = before.get((each.program, each.source))
            labels = each.program, each.source, metrics.group()
            metrics.COMPILES.labels(*labels).inc(each.count - (last.count if last else 0))
            metrics.COMPILE_SECONDS.labels(*labels).inc(each.seconds - (last.seconds if last else 0.0))
        unforeseen = report.unforeseen - self._last.unforeseen
        metrics.UNFORESEEN_COMPILES.labels(metrics.group()).inc(unforeseen)
        self._last = report
